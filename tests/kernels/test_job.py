"""Parameters, gradients and state that do not fit together are refused, whichever kernel steps."""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from tests.optim.test_arguments import assert_unchanged, snapshot
from torchpisa import MISA, SISA
from torchpisa.kernels.cpu import native
from torchpisa.kernels.cpu.native import NATIVE
from torchpisa.kernels.foreach import FOREACH
from torchpisa.kernels.job import LocalJob, Member
from torchpisa.kernels.loop import LOOP
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import plan
from torchpisa.preconditioners import SecondMoment

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
ways = pytest.mark.parametrize(
    "way", [{"foreach": False}, {"foreach": True}, {}], ids=["loop", "foreach", "default"]
)


@each
@ways
def test_resized_parameter(entry, way):
    p = nn.Parameter(torch.ones(3, 2))
    opt = entry([p], **way)
    p.grad = torch.ones(3, 2)
    opt.step()
    p.grad = None
    p.data = torch.ones(6, 2)
    p.grad = torch.ones(6, 2)
    before = snapshot(opt)
    dual = entry.key("dual")
    with pytest.raises(ValueError, match=rf"\(6, 2\) with {dual} of shape \(3, 2\): make a new"):
        opt.step()
    assert_unchanged(opt, before)


@each
@ways
def test_gradient_of_another_shape(entry, way):
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.ones(3, 2)
    p.data = torch.ones(6, 2)
    opt = entry([p], **way)
    before = snapshot(opt)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) for a parameter of shape \(6, 2\)"):
        opt.step()
    assert_unchanged(opt, before)


@pytest.mark.skipif(native._library() is None, reason="needs a C compiler")
def test_many_elements_take_no_foreign_memory():
    """A million elements are stepped by several threads, where nothing else looks at sizes."""
    p = nn.Parameter(torch.randn(2**20))
    opt = SISA([p], sigma=0.5, rho=1e3, fused=True)
    p.grad = torch.randn(2**20)
    opt.step()
    p.grad = None
    p.data = torch.randn(2**21)
    p.grad = torch.randn(2**21)
    with pytest.raises(ValueError, match="make a new optimizer"):
        opt.step()


def broken_job(key, shape):
    """A job with a parameter of 9 elements and one tensor of another shape."""
    param = torch.zeros(9)
    names = ("dual.0", "moment.0", "pending")
    state = {name: torch.zeros(9) for name in names}
    state |= {"step.0": torch.zeros(()), "arrived": 0}
    member = Member(param, torch.ones(9), {**state, key: torch.zeros(shape)})
    if key == "grad":
        member = Member(param, torch.zeros(shape), state)
    numbers = {"sigma": 1.0, "rho": 1.0, "weight": 1.0, "weight_decay": 0.0, "dual_decay": 1.0}
    flags = dict.fromkeys(("grad_scale", "clip_scale", "keep", "consensus"))
    return LocalJob(
        members=[member],
        preconditioner=SecondMoment(),
        slot=0,
        maximize=False,
        **numbers,
        **flags,
    )


def step_fused(job):
    plan.find({}, "key", job.members, job.preconditioner, 0, False, False)


KERNELS = {
    "loop": LOOP.local_step,
    "foreach": FOREACH.local_step,
    "native": NATIVE.local_step,
    "fused": step_fused,
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("key", "shape"), [("grad", (3, 3)), ("dual.0", (9, 1)), ("moment.0", (27,)), ("pending", (3,))]
)
def test_every_kernel_compares_shapes(kernel, key, shape, monkeypatch):
    """Nine against three: neither broadcast nor read beyond the end."""
    if kernel == "native" and native._library() is None:
        pytest.skip("needs a C compiler")
    if kernel == "fused":
        if without_triton() is not None:
            pytest.skip("needs Triton")
        monkeypatch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    job = broken_job(key, shape)
    held = {k: v.clone() for k, v in job.members[0].state.items() if k != "arrived"}
    with pytest.raises(ValueError, match="shape"):
        KERNELS[kernel](job)
    assert not job.members[0].param.any()
    assert all(torch.equal(job.members[0].state[k], v) for k, v in held.items() if k != "step.0")


@pytest.mark.skipif(without_triton() is not None, reason="needs Triton")
def test_fused_kernels_take_state_of_one_dtype_only(monkeypatch):
    """They read all of it by the dtype of the dual."""
    monkeypatch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    job = broken_job("moment.0", (9,))
    job.members[0].state["moment.0"] = torch.zeros(9, dtype=torch.bfloat16)
    found = plan.find({}, "key", job.members, job.preconditioner, 0, False, False)
    assert found == "state of one parameter is of several dtypes"


@each
def test_state_of_frozen_parameters_may_be_read(entry):
    """As third-party code does; torch's dictionary then has an empty entry."""
    frozen, p = nn.Parameter(torch.ones(3, 2), requires_grad=False), nn.Parameter(torch.ones(3, 2))
    opt = entry.without_initial_consensus([frozen, p])
    assert opt.state[frozen] == {}
    for _ in range(2 * opt.batches):
        p.grad = torch.ones(3, 2)
        opt.step()
    opt.memory(), opt.flush()
    if entry.make is not MISA:
        opt.effective()
    other = entry.without_initial_consensus([frozen, p])
    other.load_state_dict(opt.state_dict())
    frozen.requires_grad_(True)
    for _ in range(opt.batches):
        p.grad = frozen.grad = torch.ones(3, 2)
        other.step()
    assert not torch.equal(frozen.detach(), torch.ones(3, 2))


@each
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("way", [{"foreach": False}, {}], ids=["loop", "default"])
def test_counters_do_not_follow_the_default_dtype(entry, capturable, way):
    """In bfloat16, 256 + 1 = 256."""
    settings = {"gamma": 0.999} if "gamma" in entry.settings else {}
    torch.set_default_dtype(torch.bfloat16)
    try:
        p = nn.Parameter(torch.ones(3, 2, dtype=torch.float32))
        opt = entry([p], capturable=capturable, **settings, **way)
        assert opt.state[p][entry.key("step")].dtype == torch.float32
        opt.state[p][entry.key("step")].fill_(256)
        for _ in range(opt.batches):
            p.grad = torch.ones(3, 2, dtype=torch.float32)
            opt.step()
        other = entry.without_initial_consensus([p], capturable=capturable, **settings)
        other.load_state_dict(opt.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert opt.state[p][entry.key("step")] == other.state[p][entry.key("step")] == 257
    if capturable and entry.make is not MISA:
        groups = [o.param_groups[0] for o in (opt, other)]
        numbers = [n for group in groups for k in ("sigma", "rho") for n in group[k] or ()]
        assert {number.dtype for number in numbers} <= {torch.float32}
    assert p.isfinite().all()


@pytest.mark.parametrize("scheme", ["adam", "rmsprop"])
def test_fused_on_a_cpu_under_another_default_dtype(scheme):
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.ones(5))
        p.grad = torch.ones(5)
        opt = SISA([p], scheme=scheme)
        torch.set_default_dtype(dtype)
        try:
            opt.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(p.detach())
    assert torch.equal(*ends)
