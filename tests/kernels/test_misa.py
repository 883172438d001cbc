"""MISA's fused kernels equal its plain loop; Triton's interpreter runs them without a GPU."""

import copy
import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.test_foreach import TOLERANCE
from torchpisa import MISA
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import plan, table
from torchpisa.preconditioners.consensus import Whiten

pytest.importorskip("triton")
if without_triton() is not None:
    pytest.skip(without_triton(), allow_module_level=True)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
STEPS = 20 if ON_GPU else 8
# Wide, tall, square, of several tiles, a convolution, and what is not orthogonalised: vectors,
# which do not decay, and single rows, which do.
SHAPES = [(5, 9), (9, 5), (8, 8), (70, 130), (130, 70), (4, 3, 2, 2), (7,), (2100,), (), (1, 40)]


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    yield
    patch.undo()


def run(fused, tensors, steps, change=lambda opt, k: None, seed=0, **own):
    """Return parameters and optimizer after some steps with some of the gradients missing."""
    generator = torch.Generator().manual_seed(seed)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
        for shape, dtype in tensors
    ]
    way = {"fused": True} if fused else {"fused": False, "foreach": False}
    opt = MISA(params, **{"ns_dtype": None, **way, **own})
    for k in range(steps):
        for p in params:
            noise = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype)
            missing = torch.rand((), generator=generator) < 0.1
            p.grad = None if missing else noise + 0.5 * p.detach()
        change(opt, k)
        opt.step()
    return params, opt


def assert_equal(one, two, tolerance=1e-5):
    (loop, plain), (fast, fused) = one, two
    for p, q in zip(loop, fast, strict=True):
        close = max(tolerance, TOLERANCE[p.dtype]) if p.dtype != torch.float32 else tolerance
        torch.testing.assert_close(q, p, rtol=close, atol=close)
        assert plain.state[p].keys() == fused.state[q].keys()
        for key, value in plain.state[p].items():
            torch.testing.assert_close(
                fused.state[q][key].cpu(), value.cpu(), rtol=10 * close, atol=close
            )


# Shrinking would run the interpreter for minutes.
@settings(
    max_examples=60 if ON_GPU else 10,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from([torch.float32, torch.bfloat16])),
        min_size=1,
        max_size=4,
    ),
    st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.9]),
            "look_ahead": st.sampled_from([1.0, 1.9, 2.0]),
            "row_beta": st.sampled_from([None, 0.0, 0.95]),
            "beta": st.sampled_from([0.5, 0.99]),
            "eps": st.sampled_from([1e-8, 0.1]),
            "weight_decay": st.sampled_from([0.0, 0.3]),
            "maximize": st.booleans(),
            "clip": st.sampled_from([None, 0.5]),
            "batches": st.sampled_from([1, 3]),
        }
    ),
    st.integers(0, 2**16),
)
def test_fused_equals_loop(tensors, own, seed):
    runs = [run(fused, tensors, 6, seed=seed, lr=0.01, **own) for fused in (False, True)]
    # One norm ties every parameter to the coarsest.
    coarse = own["clip"] is not None and any(dtype == torch.bfloat16 for _, dtype in tensors)
    assert_equal(*runs, tolerance=0.05 if coarse else 1e-5)


@pytest.mark.parametrize(
    "own", [{}, {"row_beta": None, "clip": 2.0, "maximize": True}, {"batches": 4}], ids=str
)
def test_fused_equals_loop_closely(own):
    """1e-5 relative in float32."""
    tensors = [(shape, torch.float32) for shape in ((5, 9), (130, 70), (1, 40), (2100,))]
    (loop, _), (fast, _) = (run(fused, tensors, STEPS, **own) for fused in (False, True))
    for p, q in zip(loop, fast, strict=True):
        assert (p - q).norm() <= 1e-5 * p.norm()


@pytest.mark.parametrize("way", ["loop", "foreach", "fused"])
@pytest.mark.parametrize(
    "own", [{}, {"row_beta": None, "batches": 2, "nonfinite": "skip"}], ids=str
)
@pytest.mark.parametrize(
    ("shape", "block", "blocks"),
    [
        ((12, 5), (4, 5), 3),
        ((12, 20), (6, 20), 2),
        ((3, 4, 9), (4, 9), 3),
        ((2, 9, 2, 2), (9, 4), 2),
    ],
    ids=str,
)
def test_blocks_are_matrices_of_their_own(shape, block, blocks, own, way):
    """Rows of queries, keys and values; stacks of experts' matrices or kernels."""
    ways = {"loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}}
    settings = {"ns_dtype": None, **ways.get(way, {"fused": True}), **own}
    generator = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE))
    vector = nn.Parameter(torch.ones(3, device=DEVICE))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().reshape(blocks, *block)]
    opt = MISA([{"params": [whole], "blocks": blocks}, {"params": [vector]}], **settings)
    apart = MISA(parts, **settings)
    for k in range(6):
        whole.grad = torch.randn(shape, generator=generator).to(DEVICE)
        vector.grad = torch.ones_like(vector)
        if k == 2 and "nonfinite" in own:
            whole.grad.flatten()[-1] = math.inf
        for part, grad in zip(parts, whole.grad.reshape(blocks, *block), strict=True):
            part.grad = grad.clone()
        opt.step()
        apart.step()
    ends = torch.stack([part.detach() for part in parts]).reshape(shape)
    torch.testing.assert_close(whole.detach(), ends, rtol=1e-5, atol=1e-6)
    assert float(opt.state[whole]["step"]) == float(apart.state[parts[0]]["step"])


def test_an_entry_that_is_not_finite_is_found_in_a_later_block():
    one, two = (nn.Parameter(torch.randn(12, 5, device=DEVICE)) for _ in range(2))
    opt = MISA([("one", one), ("two", two)], blocks=3, fused=True, ns_dtype=None)
    for p in (one, two):
        p.grad = torch.ones_like(p)
    two.grad[11, 4] = math.nan
    opt.step()
    if ON_GPU:
        torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match=r"iteration 0: two\."):
        opt.step()


def test_lr_may_be_a_tensor_and_change():
    def change(opt, k):
        opt.param_groups[0]["lr"].fill_(0.01 / (1 + k))

    tensors = [((5, 9), torch.float32), ((7,), torch.float32)]
    runs = [
        run(fused, tensors, 5, change, lr=torch.tensor(0.01, device=DEVICE), weight_decay=0.5)
        for fused in (False, True)
    ]
    assert_equal(*runs)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("capturable", [False, True])
def test_skipped_batches_and_grad_scaler(batches, capturable):
    """With `capturable` the kernels are told by a tensor, and nobody reads it."""

    def change(opt, k):
        opt.grad_scale = torch.tensor(8.0, device=DEVICE)
        opt.found_inf = torch.tensor(float(k in (0, 3, 4)), device=DEVICE)
        for p in opt.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad *= 8
                p.grad.flatten()[0] = math.inf if k in (0, 3, 4) else 1.0

    tensors = [((5, 9), torch.float32), ((9, 5), torch.float32), ((7,), torch.float32)]
    settings = {"batches": batches, "capturable": capturable}
    assert_equal(*(run(fused, tensors, 8, change, **settings) for fused in (False, True)))


def test_nonfinite_entries_count_as_zero_and_are_reported():
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((5, 9), (7,))]
        way = {"fused": True} if fused else {"fused": False, "foreach": False}
        opt = MISA([("matrix", params[0]), ("vector", params[1])], ns_dtype=None, **way)
        for k in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, device=DEVICE)
                if k == 1:
                    p.grad.flatten()[2] = math.nan if fused else 0.0
            opt.step()
        runs.append((params, opt))
    assert_equal(*runs)
    if ON_GPU:
        torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match="batch 0 of iteration 1: matrix, vector"):
        runs[1][1].step()


def test_a_batch_that_is_not_finite_is_skipped():
    def change(opt, k):
        for p in opt.param_groups[0]["params"]:
            if k == 2 and p.grad is not None:
                p.grad.fill_(math.inf)

    tensors = [((5, 9), torch.float32), ((7,), torch.float32)]
    assert_equal(*(run(fused, tensors, 5, change, nonfinite="skip") for fused in (False, True)))


def test_layouts():
    """Gradients that are transposed or expanded, and a parameter whose channels come last."""
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((6, 4), (6, 4))]
        conv = torch.randn(4, 3, 5, 5, device=DEVICE).to(memory_format=torch.channels_last)
        params.append(nn.Parameter(conv))
        way = {"fused": True} if fused else {"fused": False, "foreach": False}
        opt = MISA(params, ns_dtype=None, **way)
        for _ in range(4):
            params[0].grad = torch.full((1, 1), 0.5, device=DEVICE).expand(6, 4)
            params[1].grad = torch.randn(4, 6, device=DEVICE).t()
            params[2].grad = torch.randn(4, 3, 5, 5, device=DEVICE)
            opt.step()
        ends.append((params, opt))
    assert_equal(*ends)


def test_table_is_built_once_and_refreshed_when_a_gradient_moves(monkeypatch):
    calls = []
    for name in ("build", "refresh"):
        real = getattr(table, name)

        def counted(*args, name=name, real=real):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(table, name, counted)
    param = nn.Parameter(torch.randn(40, 30, device=DEVICE))
    opt = MISA([param], fused=True, ns_dtype=None)
    held = []
    for _ in range(2):
        param.grad = torch.ones_like(param)
        held.append(param.grad)
        opt.step()
        opt.step()
    assert calls == ["build", "refresh"]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stochastic_rounding_is_right_on_average(state_dtype):
    """200 bfloat16 copies of one parameter: their mean is where float32 ends."""
    tensors = {"entries": (200 * 8,), "matrix": (200, 8)}
    for name, shape in tensors.items():
        ends = []
        for dtype, rounds in ((torch.float32, False), (torch.bfloat16, True)):
            torch.manual_seed(0)
            w = torch.ones(shape, dtype=dtype, device=DEVICE)
            own = {"matrix": True} if name == "matrix" else {}
            opt = MISA(
                [{"params": [nn.Parameter(w)], **own}],
                lr=1e-3,
                fused=rounds,
                ns_dtype=None,
                stochastic_rounding=rounds,
                state_dtype=state_dtype if rounds else None,
                weight_decay=0.0,
            )
            (p,) = opt.param_groups[0]["params"]
            for _ in range(6):
                p.grad = torch.ones_like(p)
                opt.step()
            ends.append(p.detach().double().mean())
        moved = 1 - ends[0]
        assert moved > 0
        assert abs(ends[1] - ends[0]) < 0.2 * moved


def test_copies_step_on():
    params, opt = run(True, [((40, 30), torch.float32), ((7,), torch.float32)], 3)
    params2, opt2 = copy.deepcopy((params, opt))
    for p, q in zip(params, params2, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    opt.step()
    opt2.step()
    for p, q in zip(params, params2, strict=True):
        assert torch.equal(p, q)


def test_fused_says_why_it_cannot(monkeypatch):
    for param, reason in (
        (torch.ones(2, 2, dtype=torch.float64, device=DEVICE), "float64"),
        (torch.ones(8, device=DEVICE)[::2], "gaps"),
    ):
        with pytest.raises(ValueError, match=f"fused=True is not possible: .*{reason}"):
            MISA([nn.Parameter(param)], fused=True)
    for own in ({"before": Whiten()}, {"damping": 0.1}):
        with pytest.raises(ValueError, match=r"there is no kernel for (before=Whiten|damping=0.1)"):
            MISA([nn.Parameter(torch.ones(2, 2, device=DEVICE))], fused=True, **own)
    transposed = nn.Parameter(torch.ones(4, 3, device=DEVICE).t())
    opt = MISA([transposed], fused=True)
    transposed.grad = torch.ones_like(transposed)
    with pytest.raises(ValueError, match=r"fused=True is not possible: .*row by row"):
        opt.step()
    monkeypatch.setattr(plan, "DEVICES", ["cuda"])
    with pytest.raises(ValueError, match="CUDA devices only"):
        MISA([nn.Parameter(torch.ones(2, 2))], fused=True)


@pytest.mark.parametrize("rows", [None, (3, 1)])
def test_state_that_does_not_fit_is_not_written_to(rows):
    """The kernels know addresses only: without its rows they would write into the dual."""
    params, opt = run(True, [((5, 9), torch.float32)], 2)
    state = opt.state[params[0]]
    state.pop("rows")
    if rows is not None:
        state["rows"] = torch.zeros(rows, device=DEVICE)
    before = params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(ValueError, match="row_beta and blocks must stay what they were"):
        opt.step()
    assert torch.equal(params[0], before)
