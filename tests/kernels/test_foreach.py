"""The foreach path equals the plain loop, over random mixes of shapes, dtypes and settings."""

import copy
import inspect
import math
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.kernels import foreach as foreach_kernel
from torchpisa.kernels.foreach import rows_of

SHAPES = [(), (1,), (7,), (0,), (3, 4), (5, 2), (2, 3, 4), (4, 1, 3, 3), (1, 6), (6, 1)]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-6,
    torch.complex64: 1e-6,
    # One rounding of the parameter per step, at most one unit in the last place apart.
    torch.bfloat16: 1e-2,
    torch.float16: 1.5e-3,
}

common = st.fixed_dictionaries(
    {
        "sigma": st.sampled_from([0.5, 2.0, 30.0]),
        "rho": st.sampled_from([0.0, 1.0, 50.0]),
        "gamma": st.sampled_from([1.0, 0.95]),
        "batches": st.sampled_from([1, 2, 3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "consensus_decay": st.sampled_from([0.0, 0.2]),
        "dual_decay": st.sampled_from([1.0, 0.9]),
        "clip": st.sampled_from([None, 0.5]),
        "maximize": st.booleans(),
        "lr": st.sampled_from([1.0, 0.3]),
        "state_dtype": st.sampled_from([None, torch.float32]),
    }
)
pisa = st.tuples(st.just(PISA), st.just({}))
sisa = st.tuples(
    st.just(SISA),
    st.fixed_dictionaries(
        {
            "scheme": st.sampled_from(["adagrad", "rmsprop", "adam"]),
            "beta": st.sampled_from([0.9, 0.999]),
            "eta": st.sampled_from([0.3, math.inf]),
            "eps": st.sampled_from([0.0, 1e-3]),
        }
    ),
)
nsisa = st.tuples(
    st.just(NSISA),
    st.fixed_dictionaries(
        {
            "nesterov": st.booleans(),
            "aspect_scaling": st.booleans(),
            "momentum": st.just(0.9),
            "ns_dtype": st.none(),  # bfloat16 would hide a mistake behind its rounding
        }
    ),
)
misa = st.tuples(
    st.just(MISA),
    st.fixed_dictionaries(
        {
            "momentum": st.sampled_from([0.0, 0.9]),
            "look_ahead": st.sampled_from([1.0, 2.0]),
            "row_beta": st.sampled_from([None, 0.0, 0.95]),
            "ns_dtype": st.none(),
        }
    ),
)
shapes_and_dtypes = st.tuples(st.sampled_from(SHAPES), st.sampled_from(list(TOLERANCE)))
# Of a dozen of one kind, foreach steps copies in one tensor.
tensors = st.lists(shapes_and_dtypes, min_size=1, max_size=5) | st.tuples(
    shapes_and_dtypes, shapes_and_dtypes
).map(lambda pair: [pair[0], *[pair[1]] * 12])


@settings(max_examples=120, deadline=None)
@given(pisa | sisa | nsisa | misa, common, tensors, st.integers(0, 2**16))
def test_foreach_equals_loop(kind, common, tensors, seed):
    cls, own = kind
    if cls is NSISA:
        # The orthogonalisation amplifies the last bits of a gradient; sigma of its usual size
        # keeps what is compared the optimizer and not chaos.
        common = {**common, "sigma": 40 * common["sigma"]}
    if cls is MISA:
        known = inspect.signature(MISA).parameters
        common = {name: value for name, value in common.items() if name in known}
        common["lr"] = 0.003 * common["lr"]
    runs = []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(seed)
        params = [
            nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))
            for shape, dtype in tensors
        ]
        # Rounding is relative to where the weights have been, not to where they happen to end.
        largest = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in params]
        opt = cls(params, foreach=foreach, **own, **common)
        for _ in range(20):
            for p in params:
                noise = torch.randn(p.shape, dtype=p.dtype, generator=generator)
                missing = torch.rand((), generator=generator) < 0.15
                p.grad = None if missing else 0.1 * noise + 0.1 * p.detach()
            opt.step()
            ends = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in params]
            largest = [max(pair) for pair in zip(largest, ends, strict=True)]
        runs.append((params, opt))
    (loop, one), (fast, two) = runs
    for p, q, scale in zip(loop, fast, largest, strict=True):
        tolerance = max(TOLERANCE[p.dtype], TOLERANCE.get(common["state_dtype"], 0))
        if common["clip"] is not None:  # one norm ties every parameter to the coarsest
            tolerance = max(tolerance, *(TOLERANCE[dtype] for _, dtype in tensors))
        torch.testing.assert_close(q, p, rtol=tolerance, atol=tolerance * scale)
        for key in one.state[p]:
            if key.startswith(("arrived", "step")):
                assert one.state[p][key] == two.state[q][key]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_foreach_equals_loop_closely(cls, batches, dtype):
    """Full-precision parameters agree to 1e-6 (float32) and 1e-12 (float64) after 20 steps."""
    ends = []
    for foreach in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, dtype=dtype)) for s in SHAPES if s != (0,)]
        own = {"ns_dtype": None} if cls in (NSISA, MISA) else {}
        opt = cls(params, foreach=foreach, batches=batches, weight_decay=0.01, **own)
        for _ in range(20):
            for p in params:
                p.grad = torch.randn_like(p)
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    error = (ends[0] - ends[1]).norm() / ends[0].norm()
    assert error <= {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]


def test_foreach_leaves_the_gradients_alone():
    p = nn.Parameter(torch.ones(3))
    opt = SISA([p], foreach=True, weight_decay=0.1, maximize=True, clip=0.1)
    p.grad = torch.tensor([1.0, 2.0, 3.0])
    opt.step()
    assert p.grad.tolist() == [1.0, 2.0, 3.0]


LARGE = [(3,), (70_000,), (5, 4), (40_000,), (30_000,), (300, 300), (7,), (2, 33_000)]
MIXES = {
    "large": LARGE,
    "some stacked": [(6, 5), (6, 5), *LARGE, *[(6, 5)] * 12],
    "all stacked": [(1000,)] * 70,  # too many for one block
    "one left over": [(2**10,)] * 66,  # one has no gradient, and 64 make a block
    "stacked and uncut": [(40, 30), *[(6, 5)] * 11, (7,)],
    "one block": [(6, 5), *[(40, 30)] * 11, (7,), (0,)],  # small and large by turns
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(
    ("cls", "own"),
    [
        (SISA, {}),
        (SISA, {"eta": 0.3, "eps": 0.1, "consensus_decay": 0.1, "weight_decay": 0.1}),
        (SISA, {"sigma": 0.5, "rho": 10.0, "consensus_decay": 0.1, "eta": 0.5, "eps": 1e-3}),
        (PISA, {"weight_decay": 0.1}),
        (NSISA, {"ns_dtype": None}),
        (MISA, {"ns_dtype": None}),
    ],
)
def test_blocks_of_large_and_small_tensors_equal_the_loop(cls, own, batches, mix, monkeypatch):
    """On a CPU large tensors are cut and small ones stacked, in whatever order they come."""
    monkeypatch.setattr(foreach_kernel, "_CPU_BLOCK", 2**16)
    monkeypatch.setattr(foreach_kernel, "_CPU_BLOCK_PER_THREAD", 0)
    ends = []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in MIXES[mix]]
        opt = cls(params, foreach=foreach, batches=batches, **own)
        for step in range(4):
            for number, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=generator) + p.detach()
                if p.dim() == 2 and number % 7 == 5:  # not contiguous
                    p.grad = p.grad.t().contiguous().t()
                if number == step:  # so that counters differ
                    p.grad = None
            opt.step()
        opt.flush()
        ends.append(params)
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [{}, {"sigma": 0.5, "rho": 10.0}, {"batches": 2}])
def test_stacked_tensors_are_stepped_in_place(own):
    """Whoever holds a parameter or a part of its state sees what a step makes of it."""
    params = [nn.Parameter(torch.randn(50)) for _ in range(12)]
    opt = SISA(params, foreach=True, **own)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(50)
        opt.step()
    before = [dict(opt.state[p]) for p in params]
    versions = [p._version for p in params]
    for _ in range(2):
        opt.step()
    for p, held, version in zip(params, before, versions, strict=True):
        assert p._version > version  # autograd is told
        for key, value in opt.state[p].items():
            assert key == "arrived" or value is held[key]


def test_a_stacked_tensor_may_be_replaced_between_steps():
    """Nothing is remembered: gradients, state and groups are taken as they are in each step."""
    ends = []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(20, generator=generator)) for _ in range(12)]
        later = nn.Parameter(torch.randn(20, generator=generator))
        opt = SISA(params, foreach=foreach)
        for step in range(6):
            for number, p in enumerate([*params, later]):
                grad = torch.randn(20, generator=generator)
                p.grad = None if number == step else grad
            if step == 2:
                opt.add_param_group({"params": [later]})
            if step == 3:
                opt.load_state_dict(opt.state_dict())
            if step == 4:
                opt.state[params[0]]["dual.0"] = torch.full((20,), 0.5)
                opt.param_groups[0]["lr"] = 0.01
            opt.step()
        ends.append([*params, later])
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def half_of_them(opt, params):
    for p in params[::2]:
        p.requires_grad_(False)
        p.grad = None


def new_memory(opt, params):
    for p in params[:5]:
        p.data = p.data.clone()


def add_group(opt, params):
    params.append(nn.Parameter(torch.full((20,), 0.5)))
    opt.add_param_group({"params": params[-1:], "weight_decay": 0.1})


def load(opt, params):
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def tensor_lr(opt, params):
    opt.param_groups[0]["lr"] = torch.tensor(0.02)


def bfloat16(opt, params):
    for p in params:
        p.data = p.data.bfloat16()
        p.grad = None


def replace_state(opt, params):
    for p in params[3:7]:
        for key, value in opt.state[p].items():
            if isinstance(value, torch.Tensor):
                opt.state[p][key] = value.clone()


def swap_memory_of_state(opt, params):
    for p in params[3:7]:
        for value in opt.state[p].values():
            if isinstance(value, torch.Tensor):
                value.data = value.data.clone()


def state_in_views(opt, params):
    flat = torch.cat([opt.state[p]["dual.0"].flatten() for p in params])
    for p, view in zip(params, flat.split(20), strict=True):
        opt.state[p]["dual.0"] = view


def state_of_two_dtypes(opt, params):
    for p in params[::3]:
        for key, value in opt.state[p].items():
            if key.startswith("mom"):
                opt.state[p][key] = value.double()


CHANGES = [
    *(half_of_them, new_memory, add_group, load, tensor_lr, bfloat16, replace_state),
    *(swap_memory_of_state, state_in_views, state_of_two_dtypes),
]


@pytest.mark.parametrize(
    ("cls", "own"),
    [(SISA, {}), (SISA, {"sigma": 0.5, "rho": 10.0}), (SISA, {"batches": 3}), (MISA, {})],
)
@pytest.mark.parametrize("change", CHANGES)
def test_stacked_tensors_after_a_change(change, cls, own):
    """Whatever changes between steps, rows of tensors are found again, or made anew."""
    if cls is MISA and change is state_in_views:
        pytest.skip("its state has other names")
    ends = []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(20, generator=generator)) for _ in range(12)]
        opt = cls(params, foreach=foreach, **own)
        for step in range(12):
            if step == 4:  # in the middle of a round of three
                change(opt, params)
            if step == 8 and change is half_of_them:
                for p in params:
                    p.requires_grad_(True)
            for p in params:
                grad = torch.randn(20, generator=generator).to(p.dtype)
                p.grad = grad if p.requires_grad else None
            opt.step()
        ends.append(params)
    tolerance = 1e-2 if change is bfloat16 else 1e-5
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("cls", [SISA, MISA])
def test_a_copy_of_stacked_tensors_shares_nothing(cls, copied):
    params = [nn.Parameter(torch.randn(20)) for _ in range(12)]
    opt = cls(params)

    def steps(opt, params):
        torch.manual_seed(1)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(20)
            opt.step()
        return torch.stack([p.detach() for p in params])

    steps(opt, params)
    other_params, other = copied((params, opt))
    first = steps(opt, params)
    assert torch.equal(first, steps(other, other_params))
    assert not torch.equal(first, steps(opt, params))


def test_state_of_small_tensors_is_a_view_of_one_for_its_owner_only():
    """Objects, values and bytes stay what they were, also of what is saved."""
    params = [nn.Parameter(torch.randn(20)) for _ in range(12)]
    opt = SISA(params)
    held = [dict(opt.state[p]) for p in params]
    before = opt.memory()
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(20)
        opt.step()
    assert len({opt.state[p]["dual.0"].untyped_storage().data_ptr() for p in params}) == 1
    for p, known in zip(params, held, strict=True):
        for key, value in opt.state[p].items():
            assert key == "arrived" or value is known[key]
            assert key == "arrived" or value.shape in ((), (20,))
    assert opt.memory() == before


@pytest.mark.parametrize("turn", [1, -1])
def test_user_views_of_state_stay_views(turn):
    """A tensor that is a view of the user's own memory is not moved out of it."""
    params = [nn.Parameter(torch.randn(20)) for _ in range(12)]
    opt = SISA(params)
    flat = torch.zeros(240)
    for p, view in zip(params[::turn], flat.split(20), strict=True):
        opt.state[p]["dual.0"] = view
    for p in params:
        p.grad = torch.randn(20)
    opt.step()
    assert torch.equal(flat, torch.cat([opt.state[p]["dual.0"] for p in params[::turn]]))
    assert flat.abs().min() > 0


def test_state_that_processes_share_stays_shared():
    """As in Hogwild, where all processes step with the same state."""
    params = [nn.Parameter(torch.randn(20)) for _ in range(12)]
    opt = SISA(params)
    for state in opt.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.share_memory_()
    for p in params:
        p.grad = torch.randn(20)
    opt.step()
    for state in opt.state.values():
        assert state["step.0"] == 1
        assert all(v.is_shared() for v in state.values() if isinstance(v, torch.Tensor))


def test_rows_of_tensors_that_only_look_adjacent():
    """Memory of another owner is not taken for the next row."""
    memory = numpy.arange(24, dtype=numpy.float32)
    apart = [torch.from_numpy(memory[12 * i : 12 * i + 12]) for i in range(2)]
    rows = rows_of(apart, owned=True)
    rows += 1
    assert torch.equal(torch.stack(apart), rows)
    assert rows.tolist() == (memory.reshape(2, 12) + 1).tolist()


def test_rows_of_tensors_laid_out_in_different_ways():
    """Adjacent in memory, but one of them transposed: the rows are a copy, or are moved."""
    memory = torch.arange(18.0)
    tensors = [memory[:9].view(3, 3), memory[9:].view(3, 3).t()]
    expected = torch.stack([tensor.clone() for tensor in tensors])
    assert torch.equal(rows_of(tensors, owned=True), expected)
    assert torch.equal(torch.stack(tensors), expected)


def test_rows_are_not_taken_for_those_that_were_there_before():
    """`share_memory_()` moves rows, and others may come to be at their old addresses."""
    memory, known = numpy.zeros((2, 3), dtype=numpy.float32), {}
    rows = rows_of(torch.from_numpy(memory).unbind(), True, known)
    rows.share_memory_()
    memory += 1
    assert rows_of(torch.from_numpy(memory).unbind(), True, known).tolist() == memory.tolist()


@pytest.mark.parametrize(("cls", "own"), [(SISA, {}), (SISA, {"batches": 2}), (MISA, {})])
@pytest.mark.parametrize("change", ["fewer", "more", "others"])
def test_rows_take_no_more_memory_than_state(change, cls, own):
    """No part of them moves away, for the rest would keep the memory of all."""
    params = [nn.Parameter(torch.randn(20)) for _ in range(40)]
    opt = cls(params, **own)
    bytes_of_state = opt.memory().bytes
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(12):
        count = {"fewer": 40 - 2 * step, "more": 12 + 2 * step, "others": 20}[change]
        if change == "others":
            order = order[7:] + order[:7]
        for number, p in zip(order, params, strict=True):
            p.grad = torch.ones(20) if number < count else None
        opt.step()
        held = [entry for state in opt.state.values() for entry in state.values()]
        if cls is SISA:
            held += opt.parts()[0].rows.values()
        storages = [t.untyped_storage() for t in held if isinstance(t, torch.Tensor)]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        assert sum(sizes.values()) == bytes_of_state


def test_known_rows_are_bounded():
    known = {}
    for _ in range(600):
        rows_of([torch.zeros(3) for _ in range(2)], True, known)
    assert 0 < len(known) <= 256
