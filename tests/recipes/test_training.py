"""Passes, checkpoints of runs, and seeds."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.recipe import Line
from recipes.training import Pass, drive, finite, precision, reseed


@dataclass(frozen=True)
class Settings:
    seed: int = 0


class Walk:
    """A random walk, so that a wrong resumption shows."""

    def __init__(self, epochs: int = 6, worst: float = 1e9) -> None:
        self.done, self.epochs, self.worst = 0, epochs, worst
        self.place = torch.zeros(3)

    def epoch(self) -> Line:
        reseed(7, self.done)
        self.place += torch.randn(3)
        self.done += 1
        far = self.place.abs().sum().item()
        return {"epoch": self.done, "far": far, "diverged": far > self.worst}

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "place": self.place}

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.place = state["done"], state["place"]


def start(file: Path, walk: Walk, count: int) -> list[Line]:
    """The first lines of a run that is then abandoned."""
    lines: Iterator[Line] = drive(walk, Settings(), file, save_every=2)
    return [next(lines) for _ in range(count)]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = list(drive(Walk(), Settings(), None))
    assert len(whole) == 6
    file = tmp_path / "new" / "run.pt"
    start(file, Walk(), 5)
    resumed = Walk()
    assert list(drive(resumed, Settings(), file, save_every=2)) == whole
    assert resumed.done == 6
    assert list(file.parent.iterdir()) == []  # neither the checkpoint nor a part of one


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    start(file, Walk(), 3)
    lines = drive(Walk(), Settings(seed=1), file)
    first = next(lines)
    assert first == next(drive(Walk(), Settings(), None))
    file.unlink()  # the lines after it are no longer asked for


def test_a_run_that_diverged_ends() -> None:
    lines = list(drive(Walk(epochs=1000, worst=5.0), Settings(), None))
    assert 1 <= len(lines) < 1000
    assert [line["diverged"] for line in lines[:-1]] == [False] * (len(lines) - 1)
    assert lines[-1]["diverged"]


def test_seeds_mix_all_numbers() -> None:
    drawn = []
    for numbers in ((0, 1), (1, 0), (0, 2), (0,)):
        reseed(*numbers)
        drawn.append(torch.rand(2).tolist())
    assert len({tuple(values) for values in drawn}) == 4
    reseed(0, 1)
    assert torch.rand(2).tolist() == drawn[0]


def model_and_loss() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    return model, loss


def test_a_pass_replaces_gradients() -> None:
    model, loss = model_and_loss()
    x, y = torch.randn(6, 4), torch.randint(2, (6,))
    own = Pass(loss, model.parameters(), (x, y))
    values = [own(x, y).item() for _ in range(2)]
    assert values[0] == values[1]
    found = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    expected = torch.autograd.grad(loss(x, y), list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pass_leaves_other_parameters_alone() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    Pass(lambda x: second(first(x)).sum(), second.parameters(), ())(torch.ones(2, 3))
    assert second.weight.grad is not None
    assert first.weight.grad is None


@pytest.mark.gpu
def test_a_graph_is_like_no_graph() -> None:
    model, loss = model_and_loss()
    model.cuda()
    batches = [(torch.randn(6, 4).cuda(), torch.randint(2, (6,)).cuda()) for _ in range(3)]
    found = []
    for graph in (False, True):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        own = Pass(loss, model.parameters(), batches[0], model.buffers(), graph)
        assert (own.graph is not None) == graph
        for name, value in model.state_dict().items():  # capturing changes nothing
            assert torch.equal(value, before[name])
        for batch in batches:
            value = own(*batch).item()
            found.append([value, *(p.grad.clone() for p in model.parameters())])
        model.load_state_dict(before)
        own.clear()
    for a, b in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(a, b)


def test_precision_is_lower_on_a_gpu_only() -> None:
    x = torch.ones(2, 2)
    with precision("bfloat16", torch.device("cpu")):
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ValueError, match=r"precision must be .*, got 'half'"):
        precision("half", torch.device("cpu"))


def test_what_is_not_finite_is_not_logged() -> None:
    assert [finite(value) for value in (1.5, float("nan"), float("inf"))] == [1.5, None, None]
