"""SISA by torch's Adam kernel equals the plain loop, over random shapes and settings."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.kernels.given import NSISA, SISA
from torchpisa.kernels import blocked, loop, native
from torchpisa.kernels.job import LocalJob, Member, Move, state_key
from torchpisa.preconditioners import Identity, SecondMoment

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}

numbers = st.fixed_dictionaries(
    {
        "sigma": st.sampled_from([0.5, 2.0, 30.0]),
        "rho": st.sampled_from([1.0, 50.0, 1e3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "dual_decay": st.sampled_from([1.0, 0.9]),
        "maximize": st.booleans(),
        "grad_scale": st.sampled_from([None, torch.tensor(3.0)]),
        "clip_scale": st.sampled_from([None, torch.tensor(0.7)]),
    }
)
rules = st.builds(
    SecondMoment,
    scheme=st.sampled_from(["rmsprop", "adam"]),
    beta=st.sampled_from([0.9, 0.999]),
    eps=st.sampled_from([0.0, 1e-3]),
)
moves = st.builds(
    Move,
    total_sigma=st.sampled_from([0.7, 20.0]),
    consensus_decay=st.sampled_from([0.0, 0.2]),
    lr=st.sampled_from([1.0, 0.3, 0.0, torch.tensor(0.3)]),
    proximal=st.none(),
    rho=st.just(0.0),
)
shapes = st.lists(st.lists(st.integers(0, 6), max_size=3), min_size=1, max_size=6)
dtypes = st.lists(st.sampled_from(list(TOLERANCE)), min_size=6, max_size=6)


def a_member(shape, dtype, batches, generator):
    param = nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))
    state = {"arrived": 0, "pending": torch.full_like(param, torch.nan, requires_grad=False)}
    for slot in range(batches):
        state[state_key("dual", slot)] = torch.zeros_like(param, requires_grad=False)
        state[state_key("moment", slot)] = torch.zeros_like(param, requires_grad=False)
        state[state_key("step", slot)] = torch.zeros(())
    return Member(param, None, state)


def a_job(**given):
    job = LocalJob(
        members=[],
        preconditioner=SecondMoment(),
        slot=0,
        sigma=2.0,
        rho=50.0,
        weight=1.0,
        weight_decay=0.0,
        dual_decay=1.0,
        maximize=False,
        grad_scale=None,
        clip_scale=None,
        keep=None,
        move=Move(2.0, 0.0, 1.0),
    )
    return replace(job, **given)


def run(kernel, job, shapes, dtypes, batches, rounds, seed, missing=0.15):
    """`rounds` rounds from the same start with the same gradients, whatever the kernel."""
    generator = torch.Generator().manual_seed(seed)
    members = [
        a_member(shape, dtype, batches, generator)
        for shape, dtype in zip(shapes, dtypes, strict=False)
    ]
    largest = [1.0] * len(members)
    for _ in range(rounds):
        for slot in range(batches):
            given = []
            for param, _, state, _ in members:
                grad = torch.randn(param.shape, dtype=param.dtype, generator=generator)
                grad = 0.1 * grad + 0.1 * param.detach()
                absent = torch.rand((), generator=generator) < missing
                given.append(Member(param, None if absent else grad, state))
            kept = [None if member.grad is None else member.grad.clone() for member in given]
            own = replace(job, members=given, slot=slot, weight=(slot + 1) / batches)
            if batches > 1:
                own = replace(own, move=None)
            if kernel is blocked:
                assert blocked.supports(own)
            kernel.local_step(own)
            for member, grad in zip(given, kept, strict=True):
                assert grad is None or torch.equal(member.grad, grad)
        if batches > 1:
            loop.consensus(members, job.move, None)
            for member in members:
                member.state["arrived"] = 0
        # Rounding is relative to where the weights have been, not to where they happen to end.
        ends = [float(m.param.detach().abs().max()) if m.param.numel() else 0.0 for m in members]
        largest = [max(pair) for pair in zip(largest, ends, strict=True)]
    return members, largest


def assert_same(fast, plain):
    (members, _), (expected, largest) = fast, plain
    for (p, _, own, _), (q, _, other, _), scale in zip(members, expected, largest, strict=True):
        tolerance = TOLERANCE[p.dtype]
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance * scale)
        assert own.keys() == other.keys()
        for name, value in other.items():
            if name == "arrived" or name.startswith("step."):
                assert own[name] == value
            elif name != "pending":
                torch.testing.assert_close(own[name], value, rtol=tolerance, atol=tolerance)


@settings(max_examples=100, deadline=None)
@given(
    rules,
    numbers,
    moves,
    shapes,
    dtypes,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([32, 256, 10**6]),
    st.integers(0, 2**16),
)
def test_blocked_equals_loop(rule, numbers, move, shapes, dtypes, batches, block, seed):
    if not any(math.prod(shape) for shape in shapes):
        return
    job = a_job(preconditioner=rule, move=move, **numbers)
    usual = blocked._BLOCK_BYTES
    blocked._BLOCK_BYTES = block
    try:
        fast = run(blocked, job, shapes, dtypes, batches, 20 // batches, seed)
    finally:
        blocked._BLOCK_BYTES = usual
    assert_same(fast, run(loop, job, shapes, dtypes, batches, 20 // batches, seed))


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensors_larger_than_a_block(dtype, batches, threads, monkeypatch):
    # Smaller than usual, yet large enough for torch to use several threads.
    monkeypatch.setattr(blocked, "_BLOCK_BYTES", 2**16 * dtype.itemsize)
    elements = 2**16 * threads
    shapes = [(7,), (2, elements // 2 + 3), (elements,), (5, 5), (elements + 1,)]
    job = a_job(weight_decay=0.01, sigma=0.5, rho=1e3)
    given = job, shapes, [dtype] * len(shapes), batches, 20 // batches, 0
    fast, plain = run(blocked, *given), run(loop, *given)
    assert_same(fast, plain)
    ends, expected = (torch.cat([m.param.flatten() for m in own]) for own, _ in (fast, plain))
    assert (ends - expected).norm() <= TOLERANCE[dtype] * expected.norm()


def test_scratch_is_small(monkeypatch):
    """Whatever the parameters' size: two blocks."""
    sizes = []
    empty = torch.empty

    def noting(*size, **options):
        sizes.append(math.prod(size))
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noting)
    monkeypatch.setattr(blocked, "_BLOCK_BYTES", 256)
    run(blocked, a_job(weight_decay=0.1), [(10**4,), (30, 50)], [torch.float32] * 2, 1, 1, 0, 0.0)
    assert sizes == [2 * 64 * torch.get_num_threads()]


def test_members_of_other_kinds_are_left_to_foreach():
    """Of one job: half precision, a transposed parameter, a gradient of another layout or dtype."""

    def members():
        generator = torch.Generator().manual_seed(0)
        made = [
            a_member((6, 4), dtype, 1, generator)
            for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64)
        ]
        turned = nn.Parameter(torch.randn(4, 6, generator=generator).T)
        made.append(a_member((6, 4), torch.float32, 1, generator)._replace(param=turned))
        grads = [torch.randn(6, 4, generator=generator).to(m.param.dtype) for m in made]
        grads[2] = grads[2].T.contiguous().T
        grads[3] = grads[3].float()
        return [m._replace(grad=grad) for m, grad in zip(made, grads, strict=True)]

    fast, plain = members(), members()
    blocked.local_step(a_job(members=fast))
    loop.local_step(a_job(members=plain))
    for own, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(own.param, other.param)
        assert own.state["arrived"] == other.state["arrived"] == 1
        assert own.state["step.0"] == other.state["step.0"] == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_where_it_is(bad, monkeypatch):
    """Scratch is used for one block after the other, and must not carry it to the next."""
    monkeypatch.setattr(blocked, "_BLOCK_BYTES", 64)
    outcomes = []
    for kernel in (blocked, loop):
        member = a_member((200,), torch.float32, 1, torch.Generator().manual_seed(0))
        grad = torch.ones(200)
        grad[3] = bad
        for _ in range(2):
            kernel.local_step(a_job(members=[member._replace(grad=grad)], weight_decay=0.1))
        outcomes.append(member.param.isfinite())
    assert torch.equal(*outcomes)
    assert outcomes[0].sum() == 199


@pytest.mark.parametrize(
    "change",
    [
        {"rho": 0.0},
        {"rho": 1e-20},
        {"sigma": 1e-20},
        {"sigma": torch.tensor(2.0)},
        {"rho": torch.tensor(2.0)},
        {"keep": torch.tensor(True)},
        {"preconditioner": Identity()},
        {"preconditioner": SecondMoment("adagrad")},
        {"preconditioner": SecondMoment(eta=1.0)},
        {"members": []},
    ],
    ids=str,
)
def test_refuses_what_adam_does_not_do(change):
    member = a_member((3,), torch.float32, 1, torch.Generator())
    job = a_job(members=[member])
    assert blocked.supports(job)
    assert not blocked.supports(replace(job, **change))


@pytest.mark.parametrize("batches", [1, 3])
def test_optimizers_use_it_by_default(batches, monkeypatch):
    monkeypatch.setattr(native, "_library", lambda: None)  # the first choice
    calls = []
    real = blocked.local_step
    monkeypatch.setattr(blocked, "local_step", lambda job: (calls.append(job.slot), real(job)))
    ends = []
    for choice in ({}, {"fused": True}, {"foreach": True}, {"fused": False}):
        param = nn.Parameter(torch.linspace(-1, 1, 50))
        opt = SISA([param], batches=batches, **choice)
        for k in range(6):
            param.grad = torch.sin(param.detach() + k)
            opt.step()
        ends.append(param.detach())
    assert len(calls) == 12
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: NSISA([x.detach().reshape(2, 2) for x in p], fused=True), "NewtonSchulz"),
        (lambda p: SISA([x.detach().half() for x in p], fused=True), "torch.float16"),
        (lambda p: SISA(p, state_dtype=torch.bfloat16, fused=True), "torch.bfloat16"),
    ],
)
def test_fused_says_why_it_cannot(make, reason):
    with pytest.raises(ValueError, match=f"fused=True is not possible: .*{reason}"):
        make([nn.Parameter(torch.ones(4))])
