"""`step()` in torch.compile: no graph breaks, one graph, and the same numbers as without."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.optim.table import ENTRIES
from torchpisa import MISA, SISA

SOME = [entry for entry in ENTRIES if entry.name in ("pisa", "sisa-m3", "nsisa")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def parameters():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, device=DEVICE)) for s in ((5, 4), (4, 6), (7,))]


def schedule(opt, k):
    """A new lr, sigma and rho, as numbers, in every step."""
    for group in opt.param_groups:
        group["lr"] = 1 / (1 + k)
        if group["sigma"] is not None:
            group["sigma"] = [sigma * 1.01 for sigma in group["sigma"]]
            group["rho"] = [rho + k for rho in group["rho"]]


@pytest.mark.filterwarnings("ignore")  # the compilers warn of what they do themselves
@pytest.mark.parametrize(
    ("entry", "backend"),
    [(entry, "aot_eager") for entry in SOME] + [(SOME[1], "eager"), (SOME[1], "inductor")],
    ids=lambda value: getattr(value, "name", value),
)
def test_one_graph_over_a_changing_schedule(entry, backend):
    """In the middle of other work, which sees the moved weights; also with copies by a compiler."""
    ours, theirs = parameters(), parameters()
    opt, plain = entry(ours), entry(theirs)

    @torch.compile(backend=backend, fullgraph=True)
    def train(x):
        before = ours[0].sum()
        opt.step()
        return 2 * x + ours[0].sum() - before

    for k in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        schedule(opt, k)
        schedule(plain, k)
        before = theirs[0].sum()
        plain.step()
        moved = train(torch.ones((), device=DEVICE)) - 2
        torch.testing.assert_close(moved, theirs[0].sum() - before, rtol=1e-4, atol=1e-5)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    assert opt.iteration == plain.iteration
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:.*Profiler record function")
def test_compiled_step_itself():
    ours, theirs = parameters(), parameters()
    opt, plain = SISA(ours, batches=2), SISA(theirs, batches=2)
    step = torch.compile(opt.step, backend="aot_eager", fullgraph=True)
    for k in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p) if k % 3 or p.dim() == 1 else None
            q.grad = None if p.grad is None else p.grad.clone()
        step()
        plain.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore:.*Profiler record function")
@pytest.mark.parametrize("cls", [SISA, MISA])
def test_parameters_may_leave_a_group(cls):
    ours, theirs = parameters(), parameters()
    opt, plain = cls(ours), cls(theirs)
    step = torch.compile(opt.step, backend="aot_eager", fullgraph=True)
    for k in range(6):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if k == 3:
            opt.param_groups[0]["params"] = ours[1:]
            plain.param_groups[0]["params"] = theirs[1:]
        step()
        plain.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_with_a_scheduler_and_errors():
    """torch keeps schedulers out of graphs, so there is a break; what a step raises comes out."""
    params = parameters()
    opt = SISA(params)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k))

    @torch.compile(backend="eager")
    def train():
        opt.step()

    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        train()
        scheduler.step()
    assert opt.iteration == 3
    params[0].grad[0, 0] = float("nan")
    if DEVICE == "cuda":  # which reports by the next step
        train()
        torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match="parameter 0"):
        train()
