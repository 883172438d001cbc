"""MISA against its formulas written out, against torch's Muon, and on several processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.distributed.processes import run
from torchpisa import MISA
from torchpisa.kernels import newton_schulz as kernel
from torchpisa.optim.param_groups import split
from torchpisa.preconditioners.consensus import Whiten

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
over_paths = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


def newton_schulz(x: Tensor) -> Tensor:
    """Muon's iteration, as printed."""
    a, b, c = 3.4445, -4.7750, 2.0315
    transposed = x.size(0) > x.size(1)
    x = x.T if transposed else x
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if transposed else x


def by_hand(
    w: Tensor, gradients: list[list[Tensor]], alphas: list[float], matrix: bool, **settings: Any
) -> Tensor:
    """Several batches with a dual each: what one shared dual must equal."""
    mu, c, beta, lr = (settings[name] for name in ("mu", "c", "beta", "lr"))
    duals = [torch.zeros_like(w) for _ in alphas]
    second = torch.zeros(w.size(0), 1, **DOUBLE) if matrix else torch.zeros_like(w)
    for t, of_round in enumerate(gradients, 1):
        residuals = [pi + g for pi, g in zip(duals, of_round, strict=True)]
        deltas = [-(1 - mu) * r for r in residuals]
        u = sum(a * (pi + c * delta) for a, pi, delta in zip(alphas, duals, deltas, strict=True))
        duals = [pi + delta for pi, delta in zip(duals, deltas, strict=True)]
        if matrix:
            o = newton_schulz(u)
            second = beta * second + (1 - beta) * o.square().mean(1, keepdim=True)
            p = 0.2 * o / (second / (1 - beta**t)).sqrt()
        else:
            r = sum(a * r for a, r in zip(alphas, residuals, strict=True))
            second = beta * second + (1 - beta) * r.square()
            p = u / (second / (1 - beta**t)).sqrt()
        w = w - lr * settings["decay"] * w + lr * p
    return w


@over_paths
@pytest.mark.parametrize("matrix", [True, False], ids=["matrix", "entries"])
@pytest.mark.parametrize("shape", [(4, 6), (7, 3)])
def test_is_the_formula(shape: tuple[int, int], matrix: bool, foreach: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(shape, generator=generator, **DOUBLE))
    gradients = [
        [torch.randn(shape, generator=generator, **DOUBLE) + i for i in range(3)] for _ in range(25)
    ]
    expected = by_hand(
        *(w.detach(), gradients, [1 / 6, 2 / 6, 3 / 6], matrix),
        **{"mu": 0.8, "c": 1.7, "beta": 0.9, "lr": 0.05, "decay": 0.3},
    )
    opt = MISA(
        [{"params": [w], "matrix": matrix}],
        lr=0.05,
        **{"momentum": 0.8, "look_ahead": 1.7, "row_beta": 0.9, "beta": 0.9, "eps": 0.0},
        **{"weight_decay": 0.3, "batches": 3, "weights": [1, 2, 3], "foreach": foreach},
    )
    for of_round in gradients:
        for g in of_round:
            w.grad = g
            opt.step()
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch's Muon came with 2.9")
@pytest.mark.parametrize("shape", [(16, 24), (40, 8)])
def test_is_torchs_muon(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With c = 1 + mu and rows left alone; to rounding, if torch iterates in float32 too."""
    from torch.optim import _muon

    def iteration(grad: Tensor, *_: object) -> Tensor:
        return newton_schulz(grad.double()).to(grad.dtype)

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", iteration)
    ours, theirs = (
        nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        for _ in range(2)
    )
    settings: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    opt = MISA([ours], look_ahead=1.9, row_beta=None, ns_dtype=None, **settings)
    muon = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for k in range(30):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(k))
        ours.grad, theirs.grad = g, g.clone()
        opt.step()
        muon.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    ends = []
    for scale in (1e-3, 1.0, 1e3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        opt = MISA(model.parameters(), eps=0.0)
        for k in range(30):
            x = torch.randn(16, 5, generator=torch.Generator().manual_seed(k), **DOUBLE)
            opt.zero_grad()
            (scale * (model(x) - x[:, :2]).square().mean()).backward()
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(ends[2], ends[1], rtol=1e-9, atol=1e-11)


def test_an_absent_batch_counts_as_the_average_of_the_past() -> None:
    one, two = (nn.Parameter(torch.ones(3, 2, **DOUBLE)) for _ in range(2))
    opt, other = MISA([one], batches=2), MISA([two], batches=2)
    for k in range(8):
        for slot in range(2):
            g = torch.randn(3, 2, generator=torch.Generator().manual_seed(2 * k + slot), **DOUBLE)
            one.grad = two.grad = g
            if k == 5 and slot == 1:
                opt.skip()
                two.grad = -other.state[two]["dual"].clone()
                other.step()
            else:
                opt.step()
                other.step()
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def test_the_sum_of_a_round_is_given_back() -> None:
    p = nn.Parameter(torch.ones(100, 10))
    opt = MISA([p], batches=3)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
    assert opt.memory().by_name["pending"] == 4 * p.numel()
    opt.step()
    assert "pending" not in opt.memory().by_name


def classifier(steps: int = 0, **settings: Any) -> tuple[nn.Module, MISA]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = MISA(model.parameters(), before=Whiten(every=3), **settings)
    train(model, opt, 0, steps)
    return model, opt


def train(model: nn.Module, opt: MISA, first: int, last: int) -> None:
    for step in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def as_it_is(saved: nn.Module, a: MISA, model: nn.Module, b: MISA, folder: Path) -> None:
    b.load_state_dict(a.state_dict())


def by_files(saved: nn.Module, a: MISA, model: nn.Module, b: MISA, folder: Path) -> None:
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    checkpoint.save({"opt": get_optimizer_state_dict(saved, a)}, checkpoint_id=folder)
    state = get_optimizer_state_dict(model, b)
    checkpoint.load({"opt": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, b, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is|TypedStorage is deprecated")
@pytest.mark.parametrize("load", [as_it_is, by_files])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3)])
def test_between_rounds_state_loads_with_any_number_of_batches(
    before: int, after: int, load: Any, tmp_path: Path
) -> None:
    """As if an optimizer with the new number had got there by itself."""
    shares = range(1, after + 1)
    saved, a = classifier(4 * before, batches=before, lr=0.02)
    model, b = classifier(batches=after, weights=shares)
    model.load_state_dict(saved.state_dict())
    load(saved, a, model, b, tmp_path)
    assert (b.iteration, b.batch, b.batches, b.param_groups[0]["lr"]) == (4, 0, after, 0.02)
    assert b.param_groups[0]["weights"] == [share / sum(shares) for share in shares]

    other, c = classifier(batches=after, weights=shares, lr=0.02)
    other.load_state_dict(saved.state_dict())
    c.round.iteration = 4
    for mine, theirs in zip(other.parameters(), saved.parameters(), strict=True):
        for name, value in a.state[theirs].items():
            c.state[mine][name].copy_(value)
    for each, opt in ((model, b), (other, c)):
        train(each, opt, 100, 100 + 4 * after)
        assert opt.iteration == 8
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert b.state[mine].keys() == c.state[theirs].keys()
        assert all(torch.equal(b.state[mine][key], c.state[theirs][key]) for key in b.state[mine])


def test_in_the_middle_of_a_round_it_does_not() -> None:
    _, a = classifier(5, batches=2)
    model, b = classifier(batches=4)
    start = [param.clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=r"=4, or saved between .*=2 in the middle of a round"):
        b.load_state_dict(a.state_dict())
    assert (b.iteration, b.batches, b.param_groups[0]["weights"]) == (0, 4, [0.25] * 4)
    a.flush()
    b.load_state_dict(a.state_dict())
    assert (b.iteration, b.batch, b.batches) == (3, 0, 4)
    assert all(map(torch.equal, start, model.parameters()))


def test_which_rule_a_parameter_takes() -> None:
    layers = {
        "token_embedding": nn.Embedding(50, 4),
        "layer": nn.Linear(4, 3),
        "out": nn.Linear(3, 1),
    }
    model = nn.ModuleDict(layers)
    tall = nn.Parameter(torch.ones(1000, 4))
    for opt, expected in [
        (MISA(model.parameters()), [True, True, False, False, False]),
        (MISA(model.named_parameters()), [False, True, False, False, False]),
        (MISA(split(model, head="out")), [True, False, False, False, False]),
        (MISA([tall, nn.Parameter(torch.ones(999, 4))]), [False, True]),
        (MISA([{"params": [tall], "matrix": True}]), [True]),
        (MISA([{"params": [nn.Parameter(torch.ones(3, 4))], "matrix": False}]), [False]),
    ]:
        params = [p for group in opt.param_groups for p in group["params"]]
        assert ["moment" not in opt.state[p] for p in params] == expected


def test_matrix_must_fit() -> None:
    with pytest.raises(ValueError, match=r"matrix must be None or False .* of shape \(3,\)"):
        MISA([{"params": [nn.Parameter(torch.ones(3))], "matrix": True}])
    with pytest.raises(ValueError, match="matrix must be one of None, True, False, got 'yes'"):
        MISA([{"params": [nn.Parameter(torch.ones(3))], "matrix": "yes"}])


@pytest.mark.parametrize(("shape", "blocks"), [((10, 4), 3), ((3, 4), 3), ((8, 4, 2), 3)])
def test_blocks_must_fit(shape: tuple[int, ...], blocks: int) -> None:
    with pytest.raises(ValueError, match=rf"blocks must divide .*, got {blocks} for one of shape"):
        MISA([nn.Parameter(torch.ones(shape))], blocks=blocks)
    vector = nn.Parameter(torch.ones(7))
    MISA([{"params": [vector], "blocks": blocks}])  # it has no rows to divide


@over_paths
def test_blocks_written_into_a_group_must_fit(foreach: bool) -> None:
    """Before anything has changed."""
    matrices = [nn.Parameter(torch.ones(12, 5)), nn.Parameter(torch.ones(10, 5))]
    opt = MISA(matrices, blocks=2, foreach=foreach)
    opt.param_groups[0]["blocks"] = 3
    for p in matrices:
        p.grad = torch.randn_like(p)
    with pytest.raises(
        ValueError, match=r"blocks must divide .*, got 3 for one of shape \(10, 5\)"
    ):
        opt.step()
    for p in matrices:
        assert torch.equal(p.detach(), torch.ones_like(p))
        assert not opt.state[p]["dual"].any()


def test_a_negative_lr_written_by_a_scheduler_is_refused() -> None:
    """In any group, and before another one has moved."""
    first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
    opt = MISA([{"params": [first]}, {"params": [second]}])
    opt.param_groups[1]["lr"] = -0.1
    first.grad = second.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got -0\.1"):
        opt.step()
    assert torch.equal(first, torch.ones(4))
    assert not opt.state[first]["dual"].any()
    assert opt.state[first]["step"] == 0


# Several processes: gradients are averaged as for any optimizer, and MISA does the rest.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))


def backward(model: nn.Module, ranks: list[int], step: int) -> None:
    losses = []
    for rank in ranks:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), **DOUBLE)
        losses.append((model(x) - rank).square().mean())
    torch.stack(losses).mean().backward()


def trained(model: nn.Module, ranks: list[int], **settings: Any) -> MISA:
    first, *rest = model.parameters()
    groups = [{"params": [first], "blocks": 3}, {"params": rest}]
    opt = MISA(groups, clip=0.5, **settings)
    for step in range(10):
        opt.zero_grad()
        backward(model, ranks, step)
        opt.step()
    return opt


def data_parallel(shared: bool) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(network().double())
    replicas = distributed.group.WORLD if shared else None
    trained(model, [distributed.get_rank()], replicas=replicas)
    return [p.detach() for p in model.parameters()]


def fully_sharded(foreach: bool | None) -> list[Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network().double()
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    trained(model, [distributed.get_rank()], foreach=foreach)
    return [p.full_tensor().detach() for p in model.parameters()]


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    model = network().double()
    trained(model, [0, 1, 2])
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        (data_parallel, (False,)),
        (data_parallel, (True,)),
        (fully_sharded, (None,)),
        (fully_sharded, (False,)),
    ],
    ids=["ddp", "ddp-replicas", "fsdp-foreach", "fsdp-loop"],
)
def test_processes_equal_one(how: Any, settings: tuple[Any, ...], expected: list[Tensor]) -> None:
    for result in run(how, 3, *settings):
        for own, other in zip(result, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


@over_paths
def test_vectors_do_not_decay(foreach: bool) -> None:
    matrix, table, bias = (nn.Parameter(torch.ones(n)) for n in ((2, 3), (1000, 2), (3,)))
    opt = MISA([matrix, table, bias], lr=0.5, weight_decay=0.1, foreach=foreach)
    for p in (matrix, table, bias):
        p.grad = torch.zeros_like(p)
    opt.step()
    for p, expected in ((matrix, 0.95), (table, 0.95), (bias, 1.0)):
        torch.testing.assert_close(p.detach(), torch.full_like(p, expected))


@over_paths
@pytest.mark.parametrize("change", [{"row_beta": 0.9}, {"row_beta": 0.9, "blocks": 2}])
def test_rows_without_averages_are_refused_before_anything_changes(
    change: dict[str, Any], foreach: bool
) -> None:
    w = nn.Parameter(torch.ones(2, 4, 3))
    averaged = 0.9 if "blocks" in change else None
    opt = MISA([w], foreach=foreach, row_beta=averaged)
    w.grad = torch.ones_like(w)
    opt.step()
    before = {key: value.clone() for key, value in opt.state[w].items()}
    opt.param_groups[0].update(change)
    with pytest.raises(ValueError, match=r"row_beta and blocks must stay .*, got 0\.9 and"):
        opt.step()
    assert all(torch.equal(value, before[key]) for key, value in opt.state[w].items())


@over_paths
def test_matrices_that_are_large_together_are_multiplied_in_bfloat16(
    foreach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(kernel, "_MIN_CPU_BFLOAT16_ELEMENTS", 60)

    def stepped(ns_dtype: Any) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.zeros(5, 6)) for _ in range(2)]
        opt = MISA(params, foreach=foreach, ns_dtype=ns_dtype)
        for p in params:
            p.grad = torch.randn(5, 6, generator=generator)
        opt.step()
        return torch.stack([p.detach() for p in params])

    assert torch.equal(stepped("auto"), stepped(torch.bfloat16))
    assert not torch.equal(stepped("auto"), stepped(None))
