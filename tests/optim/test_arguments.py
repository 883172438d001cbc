"""Wrong input: a message with the argument, its value and what is legal, and nothing changed."""

import copy
import inspect
import typing

import pytest
import torch
from torch import nn

from tests.optim.table import BAD_COMMON, BAD_OWN, ENTRIES
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.optim.arguments import Calibrated
from torchpisa.preconditioners import Hessian, NewtonSchulz, Preconditioner, SecondMoment

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def snapshot(opt):
    params = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    return params, copy.deepcopy(opt.state_dict())


def assert_unchanged(opt, before):
    now = snapshot(opt)
    assert all(torch.equal(a, b) for a, b in zip(now[0], before[0], strict=True))
    torch.testing.assert_close(now[1]["state"], before[1]["state"], rtol=0, atol=0, equal_nan=True)
    assert now[1]["param_groups"] == before[1]["param_groups"]


def stepped(entry, steps=1):
    p = nn.Parameter(torch.ones(3, 2))
    opt = entry([p])
    for _ in range(steps):
        p.grad = torch.ones(3, 2)
        opt.step()
    return p, opt


def takes(cls, settings):
    """MISA has no sigma, rho and gamma, which Python refuses.

    SISA and NSISA leave to PISA whatever is not about their penalties.
    """
    if cls in (SISA, NSISA):
        return settings.keys() & {"sigma", "rho"}
    return settings.keys() <= inspect.signature(cls).parameters.keys()


CASES = [
    (cls, bad)
    for cls in (PISA, SISA, NSISA, MISA)
    for bad in [*(bad for bad in BAD_COMMON if takes(cls, bad.settings)), *BAD_OWN[cls]]
]


@pytest.mark.parametrize(
    ("cls", "bad"), CASES, ids=lambda v: getattr(v, "__name__", None) or str(v.settings)
)
def test_bad_arguments(cls, bad):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=bad.message):
        cls([p], **bad.settings)
    assert torch.equal(p.detach(), torch.ones(2, 2))


@each
def test_bad_group_is_refused_and_nothing_added(entry):
    _, opt = stepped(entry)
    before = snapshot(opt)
    new = nn.Parameter(torch.ones(2, 2))
    for bad, message in [
        ({"lr": -1.0}, "lr must be"),
        ({"bta": 1.0}, r"unknown argument bta=1\.0 for a parameter group"),
        ({"batches": 7}, r"batches must be the same for all parameter groups \(\d\), got 7"),
        ({"clip": 3.0}, "clip must be the same for all parameter groups"),
        ({"params": [nn.Parameter(torch.ones(2).long(), requires_grad=False)]}, "params must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            opt.add_param_group({"params": [new], **bad})
        assert_unchanged(opt, before)


@each
def test_names_for_some_groups_only(entry):
    """Such as a layer that is unfrozen later, beside the named groups of `create`."""
    first, second = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    named, plain = entry([("first", first)]), entry([first])
    with pytest.raises(ValueError, match=r"must be named, .*: give list\(module\.named_parameters"):
        named.add_param_group({"params": iter([second])})
    with pytest.raises(ValueError, match=r"must be without names, .*: give list\(module\.param"):
        plain.add_param_group({"params": [("second", second)]})
    for opt, params in ((named, iter([("second", second)])), (plain, iter([second]))):
        opt.add_param_group({"params": params})
        assert [group["params"] for group in opt.param_groups] == [[first], [second]]


@each
def test_group_that_is_none(entry):
    opt = entry([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="param_group must be a dict, got a list"):
        opt.add_param_group([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize("name", ["momentum", "sisa_momentum"])
def test_momentum_written_into_a_group(name):
    p = nn.Parameter(torch.ones(2))
    opt = (SISA if name == "momentum" else NSISA)([p])
    opt.param_groups[0][name] = 1.0
    p.grad = torch.ones(2)
    before = snapshot(opt)
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\), got 1\.0"):
        opt.step()
    assert_unchanged(opt, before)


def test_a_subclass_takes_what_was_calibrated_for_its_base():
    class Mine(SISA):
        pass

    p = nn.Parameter(torch.ones(2))
    Mine([p], sigma=Calibrated(0.5, "SISA"), rho=10.0)
    with pytest.raises(ValueError, match=r"sigma must be calibrated for SISA, got .* for NSISA"):
        Mine([p], sigma=Calibrated(0.5, "NSISA"), rho=10.0)


def test_empty_parameter_list_is_torchs_error():
    for cls in (PISA, SISA, NSISA, MISA):
        with pytest.raises(ValueError, match="empty parameter list"):
            cls([])


def test_sets_are_torchs_error():
    with pytest.raises(TypeError, match="ordered"):
        NSISA([{"params": {nn.Parameter(torch.ones(2, 2))}}])


@each
def test_slot_used_twice(entry):
    p, opt = stepped(lambda params: entry(params), steps=0)
    if opt.batches == 1:
        pytest.skip("one slot, free again after every step")
    p.grad = torch.ones(3, 2)
    opt.step(batch=1)
    before = snapshot(opt)
    calls = []
    with pytest.raises(
        ValueError, match=r"batch must be one of the free slots .*, got 1, which was used"
    ):
        opt.step(lambda: calls.append(1), batch=1)
    assert not calls, "the closure must not run for a slot that cannot be used"
    assert_unchanged(opt, before)


@each
def test_slot_that_does_not_exist(entry):
    _, opt = stepped(entry)
    before = snapshot(opt)
    for slot in (-1, 99, 1.0, True):
        with pytest.raises(ValueError, match=r"batch must be .* got"):
            opt.step(batch=slot)
        assert_unchanged(opt, before)


@each
def test_sparse_gradients(entry):
    embedding = nn.Embedding(5, 3, sparse=True)
    dense = nn.Parameter(torch.ones(2, 2))
    opt = entry([dense, *embedding.parameters()])
    embedding(torch.tensor([1, 2])).sum().backward()
    dense.grad = torch.ones(2, 2)
    before = snapshot(opt)
    with pytest.raises(
        ValueError, match=r"gradients must be dense, got torch.sparse_coo .*\(5, 3\)"
    ):
        opt.step()
    assert_unchanged(opt, before)


@each
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_gradients_raise_by_default(entry, value):
    p, opt = stepped(entry)
    before = snapshot(opt)
    p.grad = torch.ones(3, 2)
    p.grad[1, 1] = value
    with pytest.raises(
        FloatingPointError, match=r"non-finite gradient in batch \d of iteration \d"
    ):
        opt.step()
    assert_unchanged(opt, before)


def test_gamma_rule_out_of_range():
    p = nn.Parameter(torch.ones(2))
    opt = SISA([p], sigma=0.5, gamma=lambda iteration: 1.0 if iteration < 2 else 1.5)
    for _ in range(2):
        p.grad = torch.ones(2)
        opt.step()
    before = snapshot(opt)
    with pytest.raises(ValueError, match=r"gamma must be in \(0, 1\], got 1\.5"):
        opt.step()
    assert_unchanged(opt, before)


def test_hessian_without_a_loss():
    p = nn.Parameter(torch.ones(2))
    opt = PISA([p], Hessian())
    p.grad = torch.ones(2)
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"call observe\(loss, outputs\) before every step"):
        opt.step()
    assert_unchanged(opt, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: SISA(p, batches=3),
            r"must be for batches=2, got batches=3: make the optimizer with as many batches",
        ),
        (
            lambda p: NSISA(p, batches=2),
            r"must have .*moment\.0.* for parameter 0, got .*momentum\.0.*: .* the same class",
        ),
        (lambda p: torch.optim.AdamW(p), r"must come from a torchpisa optimizer, got .*betas"),
        (
            lambda p: torch.optim.AdamW([{"params": p}, {"params": [nn.Parameter(torch.ones(1))]}]),
            r"from a torchpisa optimizer, .*: load the model's weights, and begin with a new opt",
        ),
        (lambda p: SISA([*p, nn.Parameter(torch.ones(1))], batches=2), r"1 parameters in group 0"),
        (
            lambda p: SISA([nn.Parameter(torch.ones(5, 5))], batches=2),
            r"must have dual\.0 of shape \(3, 2\) for parameter 0, got \(5, 5\)",
        ),
        (
            lambda p: SISA([{"params": p}, {"params": [nn.Parameter(torch.ones(1))]}], batches=2),
            r"must have 1 parameter groups, got 2: make the optimizer as the saved one was made",
        ),
    ],
    ids=["batches", "kind", "adamw", "adamw groups", "count", "shape", "groups"],
)
def test_loading_what_does_not_fit(make, message):
    _, opt = stepped(lambda params: SISA(params, batches=2), steps=3)
    other = make([nn.Parameter(torch.ones(3, 2))])
    before = snapshot(opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(other.state_dict())
    assert_unchanged(opt, before)


@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_unknown_arguments(cls):
    """Python refuses them, and every argument is shown to help() and to type checkers."""
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'sgima'"):
        cls([p], sgima=1.0)
    with pytest.raises(
        ValueError, match=r"unknown argument mometum=0\.9 .* did you mean 'momentum'"
    ):
        NSISA([{"params": [p], "mometum": 0.9}])
    kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    hints = typing.get_type_hints(cls.__init__)
    assert {"lr", "batches", "foreach", "nonfinite"} <= hints.keys()


def test_learning_rate_of_adamw_in_a_group():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first], "lr": 1e-3}, {"params": [second], "lr": 0.5}]
    with pytest.warns(UserWarning, match=r"lr=0\.001 is relative here") as warned:
        SISA(groups, sigma=1.0, rho=100.0)
    assert len(warned) == 1
    SISA(groups)  # in AdamW's terms: the suite makes errors of warnings


@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_model_instead_of_its_parameters(cls):
    with pytest.raises(
        TypeError, match=rf"got the model, a Linear: torchpisa\.{cls.__name__}\(mod"
    ):
        cls(nn.Linear(2, 2))


def test_orthogonalize_needs_matrices():
    with pytest.raises(ValueError, match=r"matrix must be None or False .* of shape \(3,\)"):
        NSISA([{"params": [nn.Parameter(torch.ones(3))], "matrix": True}])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SecondMoment("rms"), "scheme must be one of"),
        (lambda: SecondMoment(beta=1.0), r"beta must be in \(0, 1\), got 1\.0"),
        (lambda: NewtonSchulz(momentum=-0.1), r"momentum must be in \[0, 1\), got -0\.1"),
        (lambda: NewtonSchulz(ns_steps=2.5), r"ns_steps must be an integer >= 1, got 2\.5"),
    ],
)
def test_preconditioners_check_themselves(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_newton_schulz_refuses_vectors():
    p = nn.Parameter(torch.ones(3))
    opt = PISA([p], NewtonSchulz())
    p.grad = torch.ones(3)
    before = snapshot(opt)
    with pytest.raises(ValueError, match=r"must be real matrices for NewtonSchulz.*\(3,\)"):
        opt.step()
    assert_unchanged(opt, before)


class Broken(Preconditioner):
    """Returns what it is told to."""

    def __init__(self, d, state):
        self.d, self.state = d, state

    def solve(self, problem, state):
        return self.d, self.state


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            Broken(torch.ones(1, 2), {}),
            r"d must have the shape \(3, 2\) .* got \(1, 2\) from Broken",
        ),
        (Broken(torch.ones(3, 2), {"extra": torch.ones(1)}), r"names of Broken.init, \[\], got"),
    ],
    ids=["shape", "state"],
)
def test_own_preconditioner_that_returns_the_wrong_thing(broken, message):
    p = nn.Parameter(torch.ones(3, 2))
    opt = PISA([p], broken)
    p.grad = torch.ones(3, 2)
    before = snapshot(opt)
    with pytest.raises(ValueError, match=message):
        opt.step()
    assert_unchanged(opt, before)
