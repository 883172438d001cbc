"""Clients' memory: made at the first round, kept on disk or in RAM, and never lost."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.federated.problems import MAKERS, classes, flat, memories, mlp, simulate
from torchpisa.federated import SISA, Epochs, FedAvg, Simulation, durable_files
from torchpisa.federated.clients.memory import FILE, FileMemoryStore, TensorMemoryStore

both_ways = pytest.mark.parametrize("batched", [False, True], ids=["in turn", "at once"])


def some(iteration: int) -> Sequence[int]:
    return [i for i in range(5) if (iteration + 2 * i) % 3]


def assert_same(a: Simulation, b: Simulation) -> None:
    assert torch.equal(flat(a.server.weights), flat(b.server.weights))
    assert a.counts == b.counts
    for mine, other in zip(memories(a), memories(b), strict=True):
        assert mine.keys() == other.keys()
        for kind, tensors in mine.items():
            assert [t.dtype for t in tensors.values()] == [t.dtype for t in other[kind].values()]
            assert all(torch.equal(t, other[kind][name]) for name, t in tensors.items())


@pytest.mark.parametrize(
    ("name", "batched"), [*((name, True) for name in MAKERS), ("SISA", False), ("FedPD", False)]
)
def test_on_disk_as_in_memory(name: str, batched: bool, tmp_path: Path) -> None:
    """With checkpoints in between, after which records move."""
    algorithm = MAKERS[name](local=Epochs(1, batch_size=5))
    runs = []
    for memory in (None, tmp_path / "memory"):
        run = simulate(algorithm, 0, participation=some, batched=batched, memory=memory)
        run.run(5, every=2, checkpoint=tmp_path / f"{memory is None}.pt", progress=False)
        runs.append(run)
    assert_same(*runs)


@pytest.mark.parametrize("memory", [False, True], ids=["in memory", "on disk"])
def test_clients_take_no_room_before_their_first_round(memory: bool, tmp_path: Path) -> None:
    clients = classes([4] * 2000)
    folder = tmp_path / "memory" if memory else None

    def cohort(iteration: int) -> Sequence[int]:
        return range(iteration % 2 * 3, iteration % 2 * 3 + 5)  # 0 to 4, 3 to 7

    simulation = simulate(SISA(), 4, clients=clients, participation=cohort, memory=folder)
    store: Any = simulation._memory
    if folder is None:  # grown from 5 to twice that
        assert all(len(t) == 10 for field in store._stacked.values() for t in field.values())
    else:
        assert (folder / FILE).stat().st_size == 4096 + 8 * store._size
        assert store._size < 64 + 3 * 64 * 5 + 8 * 2 * 43  # dual, moment and step of 43 parameters
    assert not flat(simulation.memory_of(1999)["dual"]).any()
    assert flat(simulation.memory_of(7)["dual"]).all()


def test_a_checkpoint_writes_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a round's clients only, into free room: the file stops growing."""
    written: list[int] = []
    write = FileMemoryStore._write

    def counted(self: FileMemoryStore, position: int, content: memoryview) -> None:
        written.append(len(content))
        write(self, position, content)

    monkeypatch.setattr(FileMemoryStore, "_write", counted)
    clients = classes([4] * 20)
    simulation = simulate(SISA(), 0, clients=clients, participation=0.2, memory=tmp_path)
    sizes, amounts = [], []
    for rounds in range(0, 61, 10):
        written.clear()
        simulation.run(rounds, checkpoint=tmp_path / "run.pt", progress=False)
        sizes.append((tmp_path / FILE).stat().st_size if rounds else 0)
        amounts.append(sum(written))
    record = simulation._memory._size  # type: ignore[attr-defined]
    # Four clients a round, and the byte that says that a state refers to the file.
    assert set(amounts[1:]) == {10 * (4 * record + 1)}
    seen = {i for k in range(60) for i in simulation.present(k)}
    assert len(seen) == 20
    assert sizes[-1] == 4096 + record * (20 + 4)
    assert (tmp_path / "run.pt").stat().st_size < 25_000


@both_ways
def test_interruptions_at_every_moment(
    batched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, in and after a checkpoint: the last one that was finished is intact."""

    def make() -> Simulation:
        return simulate(SISA(), 0, participation=some, batched=batched, memory=tmp_path / "memory")

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    whole = simulate(SISA(), 8, participation=some, batched=batched)
    checkpoint = tmp_path / "run.pt"
    make().run(2, checkpoint=checkpoint, progress=False)
    for place, name in ((durable_files, "replace"), (FileMemoryStore, "release"), (os, "fsync")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                make().run(8, checkpoint=checkpoint, every=3, progress=False)
    resumed = make()
    resumed.run(8, checkpoint=checkpoint, progress=False)
    assert_same(resumed, whole)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("timing", ["deadline", "asynchronous"])
def test_processes_that_are_killed(timing: str, tmp_path: Path) -> None:
    module = "tests.federated.clients.killed_runs"
    command = [sys.executable, "-m", module, str(tmp_path), timing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10


def test_states_of_a_folder_are_good_until_the_next_checkpoint(tmp_path: Path) -> None:
    def make() -> Simulation:
        return simulate(SISA(), 0, participation=some, memory=tmp_path)

    first = make()
    first.run(2, progress=False)
    early = first.state_dict()
    first.run(4, progress=False)
    first.state_dict()
    first.run(6, progress=False)
    other = make()
    other.load_state_dict(early)
    for _ in range(3):
        other.round()
    assert_same(other, simulate(SISA(), 5, participation=some))
    other.run(8, checkpoint=tmp_path / "run.pt", progress=False)
    third = make()
    with pytest.raises(ValueError, match=r"no longer holds what client \d remembered .* Load the"):
        third.load_state_dict(early)
    with pytest.raises(RuntimeError, match="another simulation of this process has taken over"):
        first.round()
    third.run(9, checkpoint=tmp_path / "run.pt", progress=False)
    assert_same(third, simulate(SISA(), 9, participation=some))


def test_folders_of_another_run(tmp_path: Path) -> None:
    """One that a state refers to is left alone; one that nothing refers to is used again."""
    for _ in range(2):
        simulate(SISA(), 2, memory=tmp_path)
    simulate(SISA(), 2, memory=tmp_path).run(3, checkpoint=tmp_path / "run.pt", progress=False)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ValueError, match=r"memory must be a folder of this run alone, got '"):
        simulate(SISA(), 1, memory=tmp_path)
    assert (tmp_path / FILE).read_bytes() == before
    (tmp_path / FILE).write_bytes(b"else")
    with pytest.raises(ValueError, match=re.escape(f"whose file {FILE} is something else")):
        simulate(SISA(), 1, memory=tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(ValueError, match=f"which has no file {FILE}"):
        simulate(SISA(), 0, memory=tmp_path).run(4, checkpoint=tmp_path / "run.pt", progress=False)


def test_a_folder_of_another_process(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / FILE).open("wb") as file:  # a lock belongs to whoever opened the file
        fcntl.flock(file, fcntl.LOCK_EX)
        simulation = simulate(SISA(), 0, memory=tmp_path)
        with pytest.raises(RuntimeError, match=r"memory must be a folder of this process alone"):
            simulation.round()
    simulation.round()


def test_a_folder_and_none_do_not_mix(tmp_path: Path) -> None:
    folder, none = (simulate(SISA(), 1, memory=memory) for memory in (tmp_path, None))
    with pytest.raises(ValueError, match="memory must be the folder that the saved run kept"):
        none.load_state_dict(folder.state_dict())
    with pytest.raises(ValueError, match="memory must be None, as in the saved run"):
        folder.load_state_dict(none.state_dict())
    assert_same(folder, none)


def test_algorithms_without_memory_write_no_file(tmp_path: Path) -> None:
    simulation = simulate(FedAvg(lr=0.1), 2, memory=tmp_path / "memory")
    simulation.run(4, checkpoint=tmp_path / "run.pt", progress=False)
    assert not (tmp_path / "memory").exists()
    assert simulation.memory_of(0) == {}


def test_a_truncated_file(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run.pt"
    simulate(SISA(), 0, memory=tmp_path).run(2, checkpoint=checkpoint, progress=False)
    os.truncate(tmp_path / FILE, 5000)
    with pytest.raises(ValueError, match=r"is damaged: it ends before byte \d+"):
        simulate(SISA(), 0, memory=tmp_path).run(3, checkpoint=checkpoint, progress=False)


def test_the_initial_memory_is_that_of_the_saved_run() -> None:
    """A client that comes later begins with it, whatever the model begins with after a restart."""

    class Remembers(FedAvg):
        def remember(self, weights: Any) -> Any:
            return {"first": weights}

    def late(iteration: int) -> Sequence[int]:
        return [0, 1] if iteration < 2 else range(5)

    first = simulate(Remembers(lr=0.1), 2, participation=late)
    other_start = lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()  # noqa: E731
    second = simulate(Remembers(lr=0.1), 0, other_start, participation=late)
    second.load_state_dict(first.state_dict())
    for simulation in (first, second):
        simulation.round()
    assert_same(first, second)
    assert torch.equal(flat(second.memory_of(4)["first"]), flat(dict(mlp().named_parameters())))


def test_a_disk_that_was_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that could not be written leaves the one before it in use."""
    store = FileMemoryStore({"dual": {"x": torch.zeros(3)}}, tmp_path)

    def save(client: int, value: float) -> None:
        store.save([client], {"dual": {"x": torch.full((1, 3), value)}})

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    save(0, 1.0)
    store.state_dict()
    with monkeypatch.context() as patched:
        patched.setattr(FileMemoryStore, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            save(0, 2.0)
    store.release()
    save(1, 3.0)
    save(2, 4.0)
    loaded = store.load([0, 1, 2, 3])["dual"]["x"]
    assert loaded[:, 0].tolist() == [1.0, 3.0, 4.0, 0.0]


@pytest.mark.parametrize("on_disk", [False, True])
def test_stores(on_disk: bool, tmp_path: Path) -> None:
    """Any dtypes and shapes, in any order of clients."""
    initial = {
        "a": {"x": torch.ones(2, 3), "empty": torch.ones(0, 2)},
        "step": {"n": torch.tensor(0.5, dtype=torch.float64), "b": torch.tensor([True])},
        "half": {"h": torch.ones(3, dtype=torch.bfloat16)},
    }
    store = FileMemoryStore(initial, tmp_path) if on_disk else TensorMemoryStore(initial, 9)

    def rows(*factors: int) -> Any:
        return {
            kind: {
                name: torch.stack([(f * t).to(t.dtype) for f in factors])
                for name, t in field.items()
            }
            for kind, field in initial.items()
        }

    store.save([7, 2], rows(7, 2))
    store.save([2, 5], rows(-2, 5))
    loaded = store.load([5, 0, 2, 7])
    for kind, field in rows(5, 1, -2, 7).items():
        for name, expected in field.items():
            assert loaded[kind][name].dtype == expected.dtype
            assert torch.equal(loaded[kind][name], expected)
    loaded["a"]["x"].zero_()
    assert store.load([5])["a"]["x"].sum() == 30
