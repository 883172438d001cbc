"""Clients' folders: names stay inside, and memory settles with what the server has accepted."""

import pytest
import torch

from torchpisa.federated.flower.client_memory import (
    ClientMemory,
    FolderMemoryStore,
    MemoryMismatchError,
)


@pytest.mark.parametrize("name", ["..", ".", "", "../../x", "a/b", "%2E%2E", "\\..\\x"])
def test_names_stay_inside_the_folder(name, tmp_path):
    folder = tmp_path / "in" / "side"
    file = FolderMemoryStore(folder, name, name).file
    assert file.resolve().is_relative_to(folder.resolve())
    assert file.parent.parent == folder
    others = {FolderMemoryStore(folder, other, "x").file for other in ("..", "%2E%2E", ".", "a")}
    assert len(others) == 4


def test_memory_settles():
    memory = ClientMemory()
    assert memory.resolve(-1, 0) is None
    first, second = {"dual": {}}, {"dual": {"w": torch.ones(1)}}
    memory.set_pending(first, 0)
    assert memory.resolve(-1, 0) is None  # not taken: dropped
    memory.set_pending(first, 1)
    assert memory.resolve(1, 2) is first  # taken
    memory.set_pending(second, 4)
    assert memory.resolve(1, 5) is first
    memory.set_pending(second, 5)
    with pytest.raises(MemoryMismatchError, match=r"took update 3 .* update 1 \(pending: 5"):
        memory.resolve(3, 6)
    with pytest.raises(MemoryMismatchError, match="update 4 is asked for after update 5"):
        memory.resolve(1, 4)
    assert memory.resolve(5, 6) is second  # the refusals have changed nothing


def test_an_answer_that_was_not_taken_is_sent_again():
    old, new, answer = {"dual": {"w": torch.zeros(1)}}, {"dual": {"w": torch.ones(1)}}, {"a": 1}
    memory = ClientMemory(old, 3)
    memory.set_pending(new, 5, answer)
    assert memory.unsettled_answer(3, 7, 0, oldest=5) is answer
    assert memory.unsettled_answer(3, 5, 0, oldest=4) is answer
    assert memory.unsettled_answer(3, 7, 0, oldest=6) is None  # too old, or rejected
    assert memory.unsettled_answer(5, 7, 0, oldest=5) is None  # taken
    assert memory.unsettled_answer(4, 7, 0, oldest=5) is None  # of another past
    assert memory.unsettled_answer(3, 4, 0, oldest=2) is None  # an old message
    assert memory.unsettled_answer(3, 7, 1, oldest=5) is None  # the client was started anew
    assert memory.resolve(5, 8) is new
    assert memory.answer is None
    assert memory.unsettled_answer(5, 8, 0, oldest=0) is None


@pytest.mark.parametrize("accepted", [3, 5])
def test_settled_memory_waits_for_nothing(accepted: int) -> None:
    """Check both cases: its last update was taken, or dropped."""
    old, new = {"dual": {"w": torch.zeros(1)}}, {"dual": {"w": torch.ones(1)}}
    memory = ClientMemory(old, 3, new, 5)
    assert memory.resolve(accepted, 6) is (new if accepted == 5 else old)
    assert (memory.pending, memory.asked, memory.taken) == (None, -1, accepted)
