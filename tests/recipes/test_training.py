"""Passes, checkpoints of runs, and seeds."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.datasets import CorruptFileError
from recipes.recipe import Line
from recipes.training import (
    GraphedPass,
    Training,
    finite_or_none,
    forward_precision,
    run_training,
    seed_from,
)


@dataclass(frozen=True)
class Settings:
    seed: int = 0
    name: str = "run"


class Walk(Training):
    """A random walk, so that a wrong resumption shows."""

    def __init__(self, seed: int = 0, epochs: int = 6, worst: float = 1e9) -> None:
        super().__init__(Settings(seed), torch.device("cpu"), epochs)
        self.worst = worst
        self.place = torch.zeros(3)

    def advance(self) -> Line:
        seed_from(7, self.done)
        self.place += torch.randn(3)
        self.done += 1
        far = self.place.abs().sum().item()
        return {"epoch": self.done, "far": far, "diverged": far > self.worst}

    def state(self) -> dict[str, Any]:
        return {"done": self.done, "place": self.place}

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.place = state["done"], state["place"]


class CountedWalk(Walk):
    steps = 0

    def advance(self) -> Line:
        self.steps += 1
        return super().advance()


def start(folder: Path, count: int) -> None:
    """Run the first `count` epochs and abandon the run."""
    lines = run_training(Walk(), folder, save_every=2)
    for _ in range(count):
        next(lines)


def test_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    start(tmp_path, 3)
    file = tmp_path / "run.pt"
    whole = file.read_bytes()
    weights = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, weights)
    for damaged in (whole[:-100], b"", b"no checkpoint", b"junk\n", weights.getvalue()):
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=r"run\.pt is damaged, or no checkpoint"):
            list(run_training(Walk(), tmp_path))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole = list(run_training(Walk(), None))
    assert len(whole) == 6
    folder = tmp_path / "new"
    start(folder, 5)
    assert [file.name for file in folder.iterdir()] == ["run.pt"]
    resumed = Walk()
    assert list(run_training(resumed, folder, save_every=2)) == whole
    assert resumed.done == 6
    assert list(folder.iterdir()) == []  # neither the checkpoint nor a part of one


def test_a_run_that_is_closed_is_saved_where_it_is(tmp_path: Path) -> None:
    """Without waiting for the next checkpoint, and after its last line too."""
    whole = list(run_training(Walk(), None))
    lines = run_training(Walk(), tmp_path, save_every=100)
    assert [next(lines) for _ in range(3)] == whole[:3]
    lines.close()
    resumed = CountedWalk()
    lines = run_training(resumed, tmp_path, save_every=100)
    assert [next(lines) for _ in range(6)] == whole
    assert resumed.steps == 3
    lines.close()
    done = CountedWalk()
    assert list(run_training(done, tmp_path)) == whole
    assert done.steps == 0
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_other_settings_is_not_used(tmp_path: Path) -> None:
    start(tmp_path, 3)
    first = next(run_training(Walk(seed=1), tmp_path))
    assert first == next(run_training(Walk(), None))


def test_a_checkpoint_that_cannot_be_written_is_named_and_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, 2)
    saved = (tmp_path / "run.pt").read_bytes()

    def fill_disk(state: Any, file: Path) -> None:
        file.write_bytes(b"PK")
        raise RuntimeError("unexpected pos 204224 vs 204120")

    monkeypatch.setattr(torch, "save", fill_disk)
    with pytest.raises(OSError, match=r"run\.pt cannot be written, with [\d,]+ MiB left .* pos"):
        start(tmp_path, 4)
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    assert (tmp_path / "run.pt").read_bytes() == saved


def test_a_run_that_diverged_ends() -> None:
    lines = list(run_training(Walk(epochs=1000, worst=5.0), None))
    assert 1 <= len(lines) < 1000
    assert [line["diverged"] for line in lines[:-1]] == [False] * (len(lines) - 1)
    assert lines[-1]["diverged"]


def test_seeds_mix_all_numbers() -> None:
    drawn = []
    for numbers in ((0, 1), (1, 0), (0, 2), (0,)):
        seed_from(*numbers)
        drawn.append(torch.rand(2).tolist())
    assert len({tuple(values) for values in drawn}) == 4
    seed_from(0, 1)
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
    graphed = GraphedPass(loss, model.parameters(), (x, y))
    values = [graphed(x, y).item() for _ in range(2)]
    assert values[0] == values[1]
    results = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    expected = torch.autograd.grad(loss(x, y), list(model.parameters()))
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_a_pass_leaves_other_parameters_alone() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    GraphedPass(lambda x: second(first(x)).sum(), second.parameters(), ())(torch.ones(2, 3))
    assert second.weight.grad is not None
    assert first.weight.grad is None


@pytest.mark.gpu
def test_a_graph_is_like_no_graph() -> None:
    model, loss = model_and_loss()
    model.cuda()
    batches = [(torch.randn(6, 4).cuda(), torch.randint(2, (6,)).cuda()) for _ in range(3)]
    results = []
    for graph in (False, True):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        graphed = GraphedPass(loss, model.parameters(), batches[0], model.buffers(), graph)
        assert (graphed.graph is not None) == graph
        for name, value in model.state_dict().items():  # capturing changes nothing
            assert torch.equal(value, before[name])
        for batch in batches:
            value = graphed(*batch).item()
            results.append([value, *(p.grad.clone() for p in model.parameters())])
        model.load_state_dict(before)
        graphed.clear()
    for a, b in zip(results[:3], results[3:], strict=True):
        torch.testing.assert_close(a, b)


def test_precision_is_lower_on_a_gpu_only() -> None:
    x = torch.ones(2, 2)
    with forward_precision("bfloat16", torch.device("cpu")):
        assert (x @ x).dtype == torch.float32
    with pytest.raises(ValueError, match=r"precision must be .*, got 'half'"):
        forward_precision("half", torch.device("cpu"))


def test_what_is_not_finite_is_not_logged() -> None:
    assert [finite_or_none(value) for value in (1.5, float("nan"), float("inf"))] == [
        1.5,
        None,
        None,
    ]
