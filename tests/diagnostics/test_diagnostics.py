"""The rounds that give rows, and changes of the optimizer between them."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.diagnostics import literal
from tests.diagnostics.test_measure import backward, network
from tests.optim.table import ENTRIES, Entry
from torchpisa import MISA, SISA
from torchpisa.diagnostics import Diagnostics

# Noise and unequal data, where it is right to warn.
pytestmark = pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning")

# MISA has one dual for all batches, and nothing to be compared between them.
OURS = [entry for entry in ENTRIES if entry.make is not MISA]
each = pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)

Rows = list[dict[str, float]]


def train(model: nn.Module, opt: Any, rounds: int) -> None:
    for k in range(rounds):
        for part in range(opt.batches):
            backward(model, opt.iteration * opt.batches + k + part, part)
            opt.step()


def expected_row(model: nn.Module, opt: Any) -> dict[str, float]:
    """Train one round; what its row must be."""
    old = literal.copied(opt)
    train(model, opt, 1)
    return literal.row(opt, old, literal.copied(opt))


def iterations(rows: Rows) -> list[float]:
    return [row["iteration"] for row in rows]


# When


@pytest.mark.parametrize("batches", [1, 3])
def test_every(batches: int) -> None:
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters(), batches=batches)
    watch = Diagnostics(opt, every=4, callback=rows.append)
    assert watch.latest == {}
    train(model, opt, 3)
    assert watch.latest == {}
    expected = expected_row(model, opt)
    assert watch.latest == rows[0] == pytest.approx({**expected, "absent": 0}, rel=1e-9)
    train(model, opt, 9)
    assert iterations(rows) == [4, 8, 12]


def test_closing_ends_it() -> None:
    model = network()
    opt = SISA(model.parameters())
    first, second = (Diagnostics(opt, every=1) for _ in range(2))
    train(model, opt, 1)
    first.close()
    first.close()
    train(model, opt, 1)
    assert (first.latest["iteration"], second.latest["iteration"]) == (1, 2)
    second.close()
    assert not opt.observers
    with Diagnostics(opt) as third:
        assert opt.observers == (third._on_round_end,)
    assert not opt.observers


def test_nothing_is_needed_but_the_optimizer() -> None:
    """Nobody has to keep it, and copies of the optimizer are not watched."""
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters())
    Diagnostics(opt, every=1, callback=rows.append)
    train(model, opt, 1)
    for other in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert not other.observers
        for param in other.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        other.step()
    assert iterations(rows) == [1]


def test_nothing_to_watch() -> None:
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    empty = nn.Parameter(torch.ones(0, 2))
    opt = SISA([frozen, empty])
    with Diagnostics(opt, every=1) as watch:
        for _ in range(3):
            empty.grad = torch.ones(0, 2)
            opt.step()
        assert watch.latest == {}


def test_rounds_that_end_without_step() -> None:
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters(), batches=2)
    with Diagnostics(opt, every=2, callback=rows.append):
        train(model, opt, 1)
        backward(model, 5, 0)
        opt.step()
        opt.flush()
        train(model, opt, 1)
        backward(model, 6, 0)
        opt.step()
        opt.skip()
    assert iterations(rows) == [2, 4]
    assert [row["absent"] for row in rows] == [1, 2]


def test_begun_in_the_middle_of_a_round() -> None:
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters(), batches=2)
    backward(model, 0, 0)
    opt.step()
    with Diagnostics(opt, every=1, callback=rows.append):
        backward(model, 1, 1)
        opt.step()
        assert not rows
        expected = expected_row(model, opt)
    assert rows == [pytest.approx({**expected, "absent": 0}, rel=1e-9)]


def test_after_a_step_that_raised() -> None:
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters(), batches=2)
    with Diagnostics(opt, every=1, callback=rows.append):
        old = literal.copied(opt)
        backward(model, 0, 0)
        opt.step()
        backward(model, 1, 1)
        (bad,) = model[0].bias.grad[:1]
        bad.fill_(torch.nan)
        with pytest.raises(FloatingPointError):
            opt.step()
        assert not rows
        backward(model, 1, 1)
        opt.step()
        expected = literal.row(opt, old, literal.copied(opt))
    assert rows == [pytest.approx({**expected, "absent": 0}, rel=1e-9)]


def test_a_callback_may_raise() -> None:
    def stop(row: object) -> None:
        raise KeyboardInterrupt

    model = network()
    opt = SISA(model.parameters())
    watch = Diagnostics(opt, every=1, callback=stop)
    with pytest.raises(KeyboardInterrupt):
        train(model, opt, 1)
    assert opt.iteration == watch.latest["iteration"] == 1
    watch.close()
    train(model, opt, 1)


def test_groups_and_parameters_that_come_later() -> None:
    model, more = network(), nn.Parameter(torch.ones(5, dtype=torch.float64))
    late = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    rows: Rows = []
    opt = SISA([*model.parameters(), late], batches=2)
    with Diagnostics(opt, every=1, callback=rows.append):
        train(model, opt, 2)
        opt.add_param_group({"params": [more], "sigma": 7.0})
        more.grad = torch.ones_like(more)
        train(model, opt, 1)  # of which there is nothing to compare with
        assert iterations(rows) == [1, 2]
        expected = expected_row(model, opt)
        assert rows[-1] == pytest.approx({**expected, "absent": 0}, rel=1e-9)
        late.requires_grad_()
        late.grad = torch.ones_like(late)
        train(model, opt, 1)
        expected = expected_row(model, opt)
        assert rows[-1] == pytest.approx({**expected, "absent": 0}, rel=1e-9)
    assert iterations(rows) == [1, 2, 4, 6]


def test_after_a_load() -> None:
    """The state before it says nothing about the round after it."""
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters())
    twin = network()
    other = SISA(twin.parameters(), sigma=3.0)
    train(twin, other, 2)
    with Diagnostics(opt, every=1, callback=rows.append):
        train(model, opt, 2)
        opt.load_state_dict(other.state_dict())
        assert opt.iteration == 2
        train(model, opt, 1)
        assert iterations(rows) == [1, 2]
        expected = expected_row(model, opt)
    assert rows[-1] == pytest.approx({**expected, "absent": 0}, rel=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_inside_a_compiled_function() -> None:
    model, rows = network(), []  # type: tuple[nn.Module, Rows]
    opt = SISA(model.parameters(), batches=2)
    step = torch.compile(opt.step, backend="aot_eager", fullgraph=True)
    with Diagnostics(opt, every=1, callback=rows.append):
        for k in range(6):
            backward(model, k, k % 2)
            step()
    assert iterations(rows) == [1, 2, 3]


# Absent batches


@each
@pytest.mark.parametrize("capturable", [False, True], ids=["host", "device"])
def test_absent_batches_are_counted(entry: Entry, capturable: bool) -> None:
    plain = {"gamma": 0.99} if "gamma" in entry.settings else {}
    param = nn.Parameter(torch.ones(4, 3))
    opt = entry([param], nonfinite="skip", capturable=capturable, **plain)
    left_out = 0
    with Diagnostics(opt, every=1) as watch:
        for k in range(7):
            old = literal.copied(opt)
            for part in range(opt.batches):
                bad = (k, part) in ((2, 0), (4, opt.batches - 1), (5, 0))
                left_out += bad
                param.grad = torch.randn(4, 3)
                if bad:
                    param.grad[1, 1] = torch.inf
                opt.step()
            row, expected = watch.latest, literal.row(opt, old, literal.copied(opt))
            assert row["absent"] == left_out
            for name in ("primal_residual", "dual_residual", "dual_norm"):
                assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-9)


def test_absent_batches_of_a_scaler_and_of_a_resumed_run() -> None:
    param = nn.Parameter(torch.ones(4))
    opt = SISA([param])
    for found_inf in (0.0, 1.0, 0.0):
        param.grad = torch.ones(4)
        opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(found_inf)
        opt.step()
    resumed = SISA([param])
    resumed.load_state_dict(opt.state_dict())
    with Diagnostics(resumed, every=1) as watch:
        resumed.skip()
        assert watch.latest["absent"] == 2


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"every": 2.5}, "every must be an integer >= 1, got 2.5"),
        ({"csv": 3}, "csv must be a path, got 3"),
        ({"csv": "nowhere/run.csv"}, "csv must be a file in a folder that exists, got 'nowhere/"),
        ({"csv": "."}, "csv must be a file in a folder that exists, got '.'"),
        (
            {"csv": "other.csv"},
            "csv must be a new file or one that Diagnostics has begun, got 'oth",
        ),
        ({"csv": "short.csv"}, "which begins with 'loss'"),
        ({"tensorboard": "runs"}, "tensorboard must be a writer with add_scalar(tag, value, step)"),
        ({"callback": 1}, "callback must be a function of a row, got 1"),
    ],
    ids=str,
)
def test_bad_input(
    settings: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.csv").write_text("epoch,loss\n1,2\n")
    Path("short.csv").write_text("loss")
    opt = SISA(network().parameters())
    with pytest.raises(ValueError, match=re.escape(message)):
        Diagnostics(opt, **settings)
    assert not opt.observers
    assert Path("other.csv").read_text() == "epoch,loss\n1,2\n"


def test_other_optimizers_are_refused() -> None:
    opt: Any = torch.optim.SGD(network().parameters())
    with pytest.raises(ValueError, match=r"optimizer must be a PISA, SISA or NSISA.*got SGD"):
        Diagnostics(opt)
