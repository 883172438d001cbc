"""The fused kernels equal the plain loop; Triton's interpreter runs them where there is no GPU."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import torchpisa
from tests.kernels.given import NSISA, SISA
from tests.kernels.test_foreach import SHAPES, TOLERANCE, nsisa, pisa, sisa
from tests.kernels.test_foreach import common as any_settings
from torchpisa import PISA
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import plan, table
from torchpisa.preconditioners import Hessian, SpectralConsensus

pytest.importorskip("triton")
if without_triton() is not None:
    pytest.skip(without_triton(), allow_module_level=True)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEPS = 20 if ON_GPU else 8  # two rounds of three batches, and the beginning of another


@pytest.fixture(autouse=True, scope="module")
def _interpreted():
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    yield
    patch.undo()


def parameters(shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator).to(DEVICE))
        for shape in shapes
    ]


def give_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        noise = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype)
        p.grad = 0.1 * noise + 0.1 * p.detach()


def flat(params):
    return torch.cat([p.detach().float().flatten() for p in params])


# A block has 1024 elements: one tensor fills two and a bit, one exactly one.
tensors = st.lists(
    st.tuples(st.sampled_from([*SHAPES, (2100,), (32, 32)]), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=4,
)


# Shrinking would run the interpreter for minutes.
@settings(
    max_examples=60 if ON_GPU else 12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(pisa | sisa | nsisa, any_settings, tensors, st.integers(0, 2**16))
def test_fused_equals_loop(kind, common, tensors, seed):
    cls, own = kind
    if issubclass(NSISA, cls):
        common = {**common, "sigma": 40 * common["sigma"]}
    runs = []
    for fast in (False, True):
        generator = torch.Generator().manual_seed(seed)
        params = [
            nn.Parameter(torch.randn(shape, generator=generator).to(DEVICE, dtype))
            for shape, dtype in tensors
        ]
        largest = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in params]
        opt = cls(params, fused=fast, foreach=None if fast else False, **own, **common)
        for _ in range(STEPS):
            for p in params:
                noise = torch.randn(p.shape, generator=generator).to(DEVICE, p.dtype)
                missing = torch.rand((), generator=generator) < 0.1
                p.grad = None if missing else 0.1 * noise + 0.1 * p.detach()
            opt.step()
            ends = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in params]
            largest = [max(pair) for pair in zip(largest, ends, strict=True)]
        runs.append((params, opt))
    (loop, one), (fast, two) = runs
    for p, q, scale in zip(loop, fast, largest, strict=True):
        tolerance = TOLERANCE[p.dtype]
        if common["clip"] is not None:  # one norm ties every parameter to the coarsest
            tolerance = max(TOLERANCE[dtype] for _, dtype in tensors)
        torch.testing.assert_close(q, p, rtol=tolerance, atol=tolerance * scale)
        assert one.state[p]["arrived"] == two.state[q]["arrived"]
        for slot in range(one.batches):
            assert one.state[p][f"step.{slot}"] == two.state[q][f"step.{slot}"].cpu()


@pytest.mark.parametrize(
    ("cls", "own", "batches"),
    [
        (PISA, {}, 1),
        (SISA, {"scheme": "adagrad"}, 4),
        (SISA, {"scheme": "rmsprop", "eta": 0.5}, 1),
        (SISA, {"scheme": "adam", "beta": 0.999}, 4),
    ],
    ids=["identity", "adagrad", "rmsprop", "adam"],
)
def test_fused_equals_loop_closely(cls, own, batches):
    """1e-6 relative in float32."""
    ends = []
    for fast in (False, True):
        params = parameters([(3, 4), (2100,), (), (32, 32)])
        opt = cls(
            params,
            fused=fast,
            foreach=None if fast else False,
            batches=batches,
            weight_decay=0.01,
            **own,
        )
        for k in range(STEPS):
            give_gradients(params, k)
            opt.step()
        ends.append(flat(params))
    assert (ends[0] - ends[1]).norm() <= 1e-6 * ends[0].norm()


@pytest.mark.parametrize(
    ("own", "lr"),
    [
        ({"scheme": "adagrad", "weight_decay": 0.1}, 1e-2),
        ({"scheme": "rmsprop", "eta": 0.5, "consensus_decay": 0.1}, "tensor"),
        ({"scheme": "adam", "beta": 0.9, "eps": 0.1, "maximize": True}, 1e-2),
        ({"batches": 3, "clip": 2.0}, "tensor"),
        ({"nonfinite": "skip", "momentum": 0.5}, 1e-2),
    ],
    ids=str,
)
def test_sigma_that_follows_gradients(own, lr):
    """With gradients that are missing, zero, tiny or, where they are skipped, infinite."""
    runs = []
    for fast in (False, True):
        params = parameters([(3, 4), (2100,), (), (5,)])
        rate = torch.tensor(1e-2, device=DEVICE) if lr == "tensor" else lr
        way = {"fused": fast, "foreach": None if fast else False}
        opt = torchpisa.SISA(params, lr=rate, **way, **own)
        for k in range(12):
            give_gradients(params, k)
            params[0].grad *= 10.0 ** (k % 5 - 2)
            params[3].grad.mul_(1e-12 if k < 6 else 0.0)
            if k == 4:
                params[2].grad = None
            if k == 7 and "nonfinite" in own:
                params[1].grad[3] = math.inf
            opt.step()
        runs.append((params, opt))
    (loop, one), (fast, two) = runs
    for p, q in zip(loop, fast, strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-5)
        for slot in range(one.batches):
            for name in ("sigma", "level"):
                key = f"{name}.{slot}"
                torch.testing.assert_close(two.state[q][key], one.state[p][key], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes_of_parameters_gradients_and_state(dtype, grad_dtype):
    """Rounding of the state apart, 10 steps end where the plain loop ends."""
    ends = []
    for fast in (False, True):
        params = parameters([(40, 30)], dtype)
        settings = {"state_dtype": torch.bfloat16, "batches": 2}
        opt = SISA(params, fused=fast, foreach=None if fast else False, **settings)
        for k in range(10):
            give_gradients(params, k)
            if dtype == torch.float32:  # elsewhere torch itself insists on the parameter's dtype
                params[0].grad_dtype = None
                params[0].grad = params[0].grad.to(grad_dtype)
            opt.step()
        ends.append(flat(params))
    assert (ends[0] - ends[1]).norm() <= 5e-3 * ends[0].norm()


@pytest.mark.parametrize("cls", [torchpisa.SISA, NSISA, torchpisa.MISA])
def test_the_default_device_does_not_matter(cls):
    params = parameters([(3, 4), (5,)])
    opt = cls(params)
    give_gradients(params, 0)
    with torch.device("meta"):
        opt.step()
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("cls", [torchpisa.SISA, SISA, torchpisa.MISA])
def test_clipping_beside_a_group_of_float64(cls):
    """The factor is float64 then; the kernels go on in float32, and write bfloat16."""
    ends = []
    for foreach in (False, None):
        params = [*parameters([(3, 4)], torch.bfloat16), *parameters([(5,)], torch.float64)]
        opt = cls([{"params": [p]} for p in params], clip=0.1, foreach=foreach)
        for k in range(3):
            give_gradients(params, k)
            opt.step()
        ends.append(flat(params))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-2, atol=1e-2)


def test_gradients_laid_out_in_another_way():
    """Expanded, transposed and channels-last gradients; they are not written to."""
    ends = []
    for fast in (False, True):
        params = parameters([(6, 4), (6, 4), (4, 3, 5, 5)])
        params[2] = nn.Parameter(params[2].detach().to(memory_format=torch.channels_last))
        opt = SISA(params, fused=fast, foreach=None if fast else False)
        for k in range(4):
            give_gradients(params, k)
            params[0].grad = torch.full((1, 1), 0.5, device=DEVICE).expand(6, 4)
            params[1].grad = params[1].grad.t().contiguous().t()
            opt.step()
            assert params[0].grad.stride() == (0, 0)
        ends.append(flat(params))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)


def test_table_is_built_once_and_refreshed_when_a_gradient_moves(monkeypatch):
    calls = []
    for name in ("build", "refresh"):
        real = getattr(table, name)

        def counted(*args, name=name, real=real):
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(table, name, counted)
    params, twin = parameters([(40, 30), (5,)]), parameters([(40, 30), (5,)])
    opt = SISA(params, fused=True)
    plain = SISA(twin, fused=False, foreach=False)
    give_gradients(params, 0)
    for k in range(6):
        if k == 3:  # other memory, held so that it cannot be the same again
            held = [p.grad for p in params]
            for p in params:
                p.grad = p.grad.clone()
        for p, q in zip(params, twin, strict=True):
            p.grad.fill_(k + 1)
            q.grad = p.grad.clone()
        opt.step()
        plain.step()
    assert len(held) == 2
    assert calls == ["build", "refresh"]
    torch.testing.assert_close(flat(params), flat(twin), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [SISA, NSISA])
@pytest.mark.parametrize("batches", [1, 2])
def test_skipped_batches_and_grad_scaler(cls, batches):
    ends = []
    for fast in (False, True):
        params = parameters([(5, 4), (7,)])
        own = {"ns_dtype": None} if cls is NSISA else {}
        opt = cls(params, fused=fast, foreach=None if fast else False, batches=batches, **own)
        opt.grad_scale = torch.tensor(8.0, device=DEVICE)
        for k in range(8):
            give_gradients(params, k)
            for p in params:
                p.grad *= 8
            opt.found_inf = torch.tensor(float(k in (0, 3, 4)), device=DEVICE)
            if k in (0, 3, 4):
                params[0].grad[0, 0] = math.inf
            opt.step()
        ends.append(flat(params))
    assert (ends[0] - ends[1]).norm() <= 1e-6 * ends[0].norm()


@pytest.mark.parametrize("cls", [SISA, NSISA])
def test_nonfinite_entries_are_left_out_and_reported(cls):
    params = parameters([(5, 4), (7,)])
    opt = cls([("matrix", params[0]), ("vector", params[1])], fused=True)
    give_gradients(params, 0)
    params[1].grad[2] = math.nan
    before = params[1].detach().clone()
    opt.step()
    assert torch.isfinite(flat(params)).all()
    assert params[1][2] == before[2]
    assert (params[1] != before).sum() == 6
    if ON_GPU:
        torch.cuda.synchronize()
    give_gradients(params, 1)
    with pytest.raises(FloatingPointError, match="batch 0 of iteration 0: vector"):
        opt.step()
    opt.step()
    opt.flush()
    assert torch.isfinite(flat(params)).all()
    assert all(torch.isfinite(value).all() for value in opt.state[params[1]].values() if
               isinstance(value, torch.Tensor))  # fmt: skip


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: SISA([nn.Parameter(torch.ones(2, dtype=torch.float64))], fused=True), "float64"),
        (
            lambda: SISA([nn.Parameter(torch.ones(2, dtype=torch.complex64))], fused=True),
            "complex64",
        ),
        (lambda: PISA([nn.Parameter(torch.ones(2))], Hessian(), fused=True), "Hessian"),
        (lambda: SISA([nn.Parameter(torch.ones(8)[::2])], fused=True), "gaps"),
        (
            lambda: NSISA([nn.Parameter(torch.ones(4, 3).t())], fused=True),
            "row by row",
        ),
    ],
)
def test_fused_says_why_it_cannot(make, reason):
    with pytest.raises(ValueError, match=f"fused=True is not possible: .*{reason}"):
        make()


def test_pickled_and_copied_optimizers_step_on():
    import copy

    params = parameters([(40, 30)])
    opt = SISA(params, fused=True)
    give_gradients(params, 0)
    opt.step()
    params2, opt2 = copy.deepcopy((params, opt))
    for p, q in zip(params, params2, strict=True):
        q.grad = p.grad.clone()
    opt.step()
    opt2.step()
    assert torch.equal(flat(params), flat(params2))


def test_perturbation_stands_in_for_zeros():
    """Without a gradient dual and o are zero in the first step; the weights move all the same."""
    ends = []
    for fast in (False, True):
        params = parameters([(5, 4)])
        own = {"perturbation": 0.5, "ns_dtype": None}
        opt = NSISA(params, fused=fast, foreach=None if fast else False, **own)
        for _ in range(3):
            params[0].grad = torch.zeros_like(params[0])
            opt.step()
        ends.append(flat(params))
    assert (ends[0] != flat(parameters([(5, 4)]))).all()
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [SISA, NSISA])
def test_a_pending_sum_that_moved_is_found(make):
    """As it does when it joins others in one buffer to be sent; gradients stay where they are."""
    results = []
    for fast in (False, True):
        params = parameters([(40, 30), (7,)])
        own = {"ns_dtype": None} if make is NSISA else {}
        opt = make(params, fused=fast, foreach=None if fast else False, batches=2, **own)
        give_gradients(params, 0)
        old = []
        for _ in range(6):
            opt.step()
            for p in params:
                old.append(opt.state[p]["pending"])
                opt.state[p]["pending"] = old[-1].clone()
                old[-1].fill_(math.nan)
        results.append(flat(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_consensus_with_a_proximal_term_is_left_to_others():
    """The fused one would move the weights without it, and nothing would say so."""
    results = []
    for own in ({}, {"foreach": False}):
        params = parameters([(40, 30), (7,)])
        opt = PISA(params, SpectralConsensus(), sigma=0.1, batches=2, **own)
        for k in range(6):
            give_gradients(params, k)
            opt.step()
        results.append(flat(params))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [SISA, torchpisa.SISA, torchpisa.MISA])
def test_counters_stay_right_where_they_are_counted_together(make):
    """Counters of all parameters are one tensor from the first step on, and move no more."""
    ends = []
    for kernel in ({"foreach": False}, {"fused": True}):
        params = parameters([(7,), (30,), (5,)])
        opt = make(params, capturable=True, **kernel)
        key = next(name for name in opt.state[params[0]] if name.startswith("step"))
        addresses = set()
        for step in range(8):
            give_gradients(params, seed=step)
            if step in (2, 5):
                params[1].grad = None
            if step == 4:
                opt.state[params[0]][key] = opt.state[params[0]][key].clone()
            if step == 6:
                opt.load_state_dict(opt.state_dict())
            opt.step()
            if step < 4:
                addresses.add(tuple(opt.state[p][key].data_ptr() for p in params))
        assert len(addresses) == 1
        ends.append((flat(params), [opt.state[p][key].item() for p in params]))
    (expected, counts), (actual, fused_counts) = ends
    assert counts == fused_counts == [8, 6, 8]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_sigma_that_was_replaced_is_found():
    """As when somebody writes a tensor of their own into the state; all else stays in place."""
    ends = []
    for kernel in ({"foreach": False}, {"fused": True}):
        params = parameters([(40, 30), (7,)])
        opt = torchpisa.SISA(params, **kernel)
        give_gradients(params, seed=0)
        old = []
        for step in range(5):
            if step in (2, 3):
                for p in params:
                    name = ("sigma.0", "level.0")[step - 2]
                    old.append(opt.state[p][name])
                    opt.state[p][name] = 30 * old[-1]
                    old[-1].fill_(math.nan)
            opt.step()
        ends.append((flat(params), *(opt.state[p]["sigma.0"] for p in params)))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)
