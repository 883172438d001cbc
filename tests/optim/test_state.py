"""Loading: everything fits or nothing changes, and what was accepted steps."""

import copy
import random
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.preconditioners import Preconditioner

# SISA in the paper's terms; otherwise it has no sigma in its groups.
PAPER = {"sigma": 0.5, "rho": 1e3}

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def parameters():
    torch.manual_seed(0)
    frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2)), frozen]


def step(opt):
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = 0.1 * torch.ones_like(p) if p.requires_grad else None
    opt.step()


def made(entry, steps):
    opt = entry.without_initial_consensus(parameters())
    for _ in range(steps):
        step(opt)
    return opt


def plain(value):
    """Something that compares by value."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), repr(value.tolist()))
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else repr(value)


def everything(opt):
    weights = [p.detach() for group in opt.param_groups for p in group["params"]]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    return plain([weights, groups, list(opt.state.values())])


JUNK = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, 2**70, 10**400, 0.5, -0.5, 1e-30, 1e30),
    *(float("nan"), float("inf"), "x", "", b"", [], [1.0], [1.0, 2.0], ["x"], [None, None]),
    *({}, {"a": 1}, {0: {}}, (), (1.0,), object(), int, torch.float16, torch.int8, "cpu"),
    *(torch.tensor(1.0), torch.tensor(float("nan")), torch.tensor(True), torch.tensor(1 + 1j)),
    *(torch.tensor([1.0, 2.0]), torch.zeros(3, 2), torch.zeros(0), torch.tensor(-1.0)),
    *(torch.empty(3, 2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(3, 2).half()),
    *(torch.zeros(3, 2, dtype=torch.float64), torch.zeros(2).long(), nn.Parameter(torch.ones(2))),
]


def places(value, at=()):
    """Paths to all entries of a nested structure."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*at, key)
        if isinstance(entry, dict | list):
            yield from places(entry, (*at, key))


def other_tensor(tensor, rng):
    return rng.choice(
        [
            lambda: tensor.to(rng.choice([torch.float16, torch.float64, torch.int32, torch.bool])),
            lambda: tensor.flatten(),
            lambda: tensor.unsqueeze(0),
            lambda: torch.cat([tensor.flatten()] * 2),
            lambda: tensor.flatten()[:1],
            lambda: tensor.t() if tensor.dim() == 2 else tensor[..., None],
            lambda: tensor.to("meta"),
            lambda: tensor.tolist(),
            lambda: -tensor - 1,
            lambda: tensor + 0.5,
            lambda: tensor.new_zeros(()).expand(tensor.shape),
        ]
    )()


def corrupted(state_dict, rng):
    """The same with one to three entries replaced, removed, added or exchanged."""
    broken = copy.deepcopy(state_dict)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        where = list(places(broken))
        *path, key = rng.choice(where)
        holder = broken
        for name in path:
            holder = holder[name]
        value = holder[key]
        way = rng.random()
        if way < 0.5:
            holder[key] = rng.choice(JUNK)
        elif way < 0.6:
            del holder[key]
        elif way < 0.7 and isinstance(holder, dict):
            holder[rng.choice(["dual.0", "extra", "step.9", 7, None, "sigma"])] = rng.choice(JUNK)
        elif isinstance(value, torch.Tensor):
            holder[key] = other_tensor(value, rng)
        elif isinstance(value, bool | int | float) and way < 0.9:
            holder[key] = rng.choice([value + 1, value - 1, -value, 2 * value, value // 2])
        elif isinstance(holder, list):
            rng.shuffle(holder)
        else:
            holder[key] = holder[rng.choice(list(holder))]
    return broken


@each
def test_corrupted_state_dicts(entry):
    """150 of each: refused by ValueError with nothing changed, or accepted, and then it steps."""
    rng = random.Random(entry.name)
    source = made(entry, entry([nn.Parameter(torch.ones(2, 2))]).batches + 1).state_dict()
    opt = made(entry, 2)
    before = everything(opt)
    refused = 0
    for number in range(150):
        problem = None
        broken = corrupted(source, rng)
        if number % 30 == 0:
            broken = rng.choice([None, [], {}, {"state": {}}, {"param_groups": []}, "x"])
        try:
            opt.load_state_dict(broken)
        except ValueError as error:
            problem = error
        if problem is not None:
            refused += 1
            assert everything(opt) == before, f"changed by what was refused with: {problem}"
            continue
        for _ in range(opt.batches + 1):
            step(opt)
        opt.flush()
        opt.memory(), getattr(opt, "effective", opt.memory)(), opt.state_dict()
        opt = made(entry, 2)
    assert 30 < refused < 150


@each
def test_nothing_of_the_state_dict_is_shared(entry):
    opt, other = made(entry, 3), made(entry, 0)
    saved = opt.state_dict()
    other.load_state_dict(saved)
    before = plain(saved)
    for _ in range(2 * opt.batches):
        step(other)
    assert plain(saved) == before


def entries(opt, name, value, group=0):
    state_dict = copy.deepcopy(opt.state_dict())
    state_dict["param_groups"][group][name] = value
    return state_dict


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sigma", [-1.0], r"param_groups\[0\]: sigma must be a finite number > 0, got -1\.0"),
        ("lr", "fast", r"param_groups\[0\]: lr must be a finite number >= 0, got 'fast'"),
        ("gamma", len, r"param_groups\[0\]: gamma must be a value, not code"),
        ("nonfinite", "warn", r"param_groups\[0\]: nonfinite must be one of"),
        ("clip", -1.0, r"param_groups\[0\]: clip must be a number > 0"),
        ("iteration", -1, r"param_groups\[0\]: iteration must be an integer in \[0, inf\]"),
        ("visited", 1, r"param_groups\[0\]: visited must be an integer in \[0, 0\], got 1"),
        ("present", 1, r"param_groups\[0\]: present must be among the slots used"),
        ("kept", [True], r"param_groups\[0\]: kept must be None or a tensor of 1 bools"),
        ("weights", [0.5], r"param_groups\[0\]: weights must add up to 1"),
        ("maximize", 1, r"param_groups\[0\]: maximize must be one of True, False, got 1"),
        ("params", [0, 0, 1], r"name every parameter once in 'params', got 0"),
        ("param_names", ["a"], r"a name for every parameter in 'param_names' of group 0"),
        ("foreach", True, None),
        ("capturable", True, None),
        ("sigma", 3.0, None),
        ("mine", {"anything": 1}, None),
    ],
)
def test_settings(name, value, message):
    opt = SISA(parameters(), **PAPER)
    step(opt)
    before, broken = everything(opt), entries(opt, name, value)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            opt.load_state_dict(broken)
        assert everything(opt) == before
    else:
        opt.load_state_dict(broken)
        step(opt)
        step(opt)


def test_capturable_state_loads_into_an_optimizer_that_is_not():
    a = SISA(parameters(), capturable=True, batches=2, **PAPER)
    b = SISA(parameters(), batches=2, **PAPER)
    step(a)
    b.load_state_dict(a.state_dict())
    assert all(isinstance(sigma, torch.Tensor) for sigma in b.param_groups[0]["sigma"])
    step(a), step(b)
    assert everything(a) == everything(b)


def test_groups_must_stand_at_the_same_point():
    opt = SISA([{"params": [p]} for p in parameters()])
    step(opt)
    with pytest.raises(ValueError, match="one iteration for all groups, got 1 in group 0 and 5"):
        opt.load_state_dict(entries(opt, "iteration", 5, group=2))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("dual.0", torch.zeros(2, 3), r"dual\.0 of shape \(3, 2\) for parameter 0, got \(2, 3\)"),
        ("dual.0", torch.zeros(3, 2).long(), r"numbers like torch\.float32 for dual\.0 of para"),
        ("dual.0", [0.0], r"a tensor for dual\.0 of parameter 0, got \[0\.0\]"),
        ("moment.0", torch.zeros(3, 2).half(), r"one dtype for the state of parameter 0"),
        ("moment.0", torch.zeros(3, 2, device="meta"), r"in memory and dense, for moment\.0"),
        ("step.0", torch.tensor(-1.0), r"one whole number >= 0 for step\.0 of parameter 0"),
        ("step.0", torch.tensor(float("nan")), r"one whole number >= 0 for step\.0"),
        ("step.0", torch.zeros(3), r"one whole number >= 0 for step\.0"),
        ("step.0", 3, r"one whole number >= 0 for step\.0"),
        ("arrived", 1, r"arrived must be among the slots used, 0 in bits, got 1"),
        ("arrived", True, r"arrived must be an integer in \[0, 1\], got True"),
        ("extra", torch.zeros(2), r"must have .* for parameter 0, got .*extra"),
    ],
)
def test_state(name, value, message):
    opt = SISA(parameters())
    step(opt)
    before, broken = everything(opt), copy.deepcopy(opt.state_dict())
    broken["state"][0][name] = value
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(broken)
    assert everything(opt) == before


def test_state_of_a_parameter_that_has_none_yet():
    """Its shape, too, is checked; once it was written into other memory."""
    p = nn.Parameter(torch.zeros(3), requires_grad=False)
    opt = SISA([p])
    big = nn.Parameter(torch.zeros(9))
    other = SISA([big])
    big.grad = torch.ones(9)
    other.step()
    with pytest.raises(ValueError, match=r"dual\.0 of shape \(3,\) for parameter 0, got \(9,\)"):
        opt.load_state_dict(other.state_dict())
    assert not opt.state


def test_state_of_nobody():
    opt = SISA(parameters())
    broken = copy.deepcopy(opt.state_dict())
    broken["state"][9] = broken["state"][0]
    with pytest.raises(ValueError, match="state of parameters only, got 9"):
        opt.load_state_dict(broken)


def test_old_counters_load():
    """Counters were once saved in torch's default dtype."""
    opt = SISA(parameters())
    step(opt)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["step.0"] = torch.tensor(1, dtype=torch.bfloat16)
    opt.load_state_dict(saved)
    counter = opt.state[opt.param_groups[0]["params"][0]]["step.0"]
    assert (counter.dtype, counter.item()) == (torch.float32, 1.0)


@each
def test_hooks_come_first_and_are_believed(entry):
    """A pre-hook may mend what would not fit, tensors included; post-hooks see the result."""
    opt, other = made(entry, 3), made(entry, 0)
    saved = opt.state_dict()
    wrong = copy.deepcopy(saved)
    del wrong["param_groups"][0]["lr"]
    dual, seen = entry.key("dual"), []
    wrong["state"][0][dual] = torch.zeros(7)

    def mend(optimizer, state_dict):
        assert optimizer is other
        assert state_dict["state"][0][dual].shape == (7,)
        mended = copy.deepcopy(saved)
        mended["state"][0][dual] += 1
        return mended

    other.register_load_state_dict_pre_hook(mend)
    other.register_load_state_dict_post_hook(lambda o: seen.append(everything(o)))
    other.load_state_dict(wrong)
    first = other.param_groups[0]["params"][0]
    assert torch.equal(other.state[first][dual], saved["state"][0][dual] + 1)
    assert seen == [everything(other)]


@each
def test_hooks_of_saving_see_what_is_saved(entry):
    opt, other, seen = made(entry, 4), made(entry, 0), []
    opt.register_state_dict_pre_hook(lambda o: seen.append(o))
    opt.register_state_dict_post_hook(lambda o, saved: seen.append(saved))
    opt.register_state_dict_post_hook(lambda o, saved: {"opt": saved})
    saved = opt.state_dict()["opt"]
    assert seen[0] is opt
    assert seen[1] is saved
    other.load_state_dict(saved)
    assert (other.iteration, other.batch) == (opt.iteration, opt.batch)


def test_hook_that_raises():
    opt = SISA(parameters())
    before = everything(opt)

    def refuse(*_):
        raise KeyError("not this one")

    opt.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(KeyError):
        opt.load_state_dict(opt.state_dict())
    assert everything(opt) == before


class Named(Preconditioner):
    """Remembers something under a name of the test's choosing."""

    def __init__(self, name, value=None):
        self.name, self.value = name, value

    def init(self, param):
        return {self.name: torch.zeros_like(param) if self.value is None else self.value}

    def solve(self, problem, state):
        return -problem.residual / (problem.sigma + problem.rho), dict(state)


TAKEN = ["arrived", "delta", "dual", "level", "moved", "pending", "sigma", "step"]


@pytest.mark.parametrize("name", [*TAKEN, "a.0", "", 3])
def test_names_that_are_taken(name):
    with pytest.raises(ValueError, match=r"names of Named\.init must be strings without"):
        PISA(parameters(), Named(name))


def test_names_that_are_taken_are_all_named():
    page = Path(__file__).parents[2] / "docs" / "preconditioners.md"
    listed = f"except {', '.join(f'`{name}`' for name in TAKEN[:-1])} and `{TAKEN[-1]}`."
    assert listed in page.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=f"none of {', '.join(TAKEN)}, which are reserved"):
        PISA(parameters(), Named("dual"))


def test_state_that_is_no_tensor():
    with pytest.raises(ValueError, match=r"counter of Named\.init must be a tensor, got 3"):
        PISA(parameters(), Named("counter", 3))


@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_numpy_numbers_become_pythons(cls, tmp_path):
    numpy = pytest.importorskip("numpy")
    settings = {
        "batches": numpy.int64(2),
        "weights": numpy.array([1.0, 3.0]),
        "sigma": numpy.array([1.0, 2.0]),
        "rho": [numpy.float32(1.0), numpy.float64(2.0)],
        "gamma": numpy.float64(0.99),
        "lr": numpy.float64(0.5),
        "weight_decay": numpy.float32(0.25),
        "clip": numpy.float64(1.0),
        "maximize": numpy.bool_(True),
    }
    if cls is NSISA:
        settings |= {"sisa_sigma": numpy.float64(1.0), "sisa_rho": numpy.array([1.0, 2.0])}
    if cls is MISA:
        settings = {k: v for k, v in settings.items() if k not in ("sigma", "rho", "gamma")}
    opt = cls(parameters(), **settings)
    opt.param_groups[0]["lr"] = numpy.float64(0.25)  # as schedulers write it
    step(opt)
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    other = cls(parameters(), batches=2)
    other.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))
    for group in other.param_groups:
        kinds = {type(v) for k, v in group.items() if k not in ("params", "kept", "preconditioner")}
        assert {kind.__module__ for kind in kinds} <= {"builtins", "torch"}
        assert group["maximize"] is True
    assert other.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_more_parameters_do_not_ask_more_often_for_their_rule(cls, monkeypatch):
    """Else construction and loading would take quadratic time."""
    name = "names_of" if cls is MISA else "Part"
    module = sys.modules[cls.__module__ if cls is not SISA else PISA.__module__]
    counts = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: (counts.append(1), real(*given))[1])
    seen = []
    for count in (2, 40):
        counts.clear()
        opt = cls([(f"w{i}", nn.Parameter(torch.ones(2, 2))) for i in range(count)])
        opt.load_state_dict(opt.state_dict())
        seen.append(len(counts))
    assert 0 < seen[0] == seen[1]


def test_initial_consensus_leaves_frozen_parameters_alone():
    params = parameters()
    before = [p.detach().clone() for p in params]
    SISA(params, initial_consensus=True, consensus_decay=1.0, **PAPER)
    changed = [not torch.equal(p, q) for p, q in zip(params, before, strict=True)]
    assert changed == [True, True, False]


@pytest.mark.parametrize("cls", [PISA, SISA, MISA])
def test_a_pickle_of_an_earlier_version(cls):
    """It has the progress of the round in the parameter groups, as a state_dict still has."""
    opt = cls(parameters(), batches=3)
    step(opt)
    held = opt.__getstate__()
    progress = held.pop("round").packed()
    held["param_groups"] = [{**group, **progress} for group in held["param_groups"]]
    other = cls.__new__(cls)
    other.__setstate__(held)
    assert (other.iteration, other.batch, other.synced) == (0, 1, False)
    assert other.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
