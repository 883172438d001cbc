"""Runs whose process is killed (SIGKILL) in the middle of what it writes, again and again.

    python -m tests.federated.clients.killed_runs FOLDER deadline
    python -m tests.federated.clients.killed_runs FOLDER asynchronous

Rounds end at a deadline, or as soon as three updates are there; either way others are under way,
and arrive later, when the run is killed.

Every child process continues the run in FOLDER and is killed a few writes later, with half of the
last one done. Prints how many were killed; ends with an error if one of them lost a checkpoint that
an earlier one had finished, or if the end is not that of a run without interruption, to the bit.
"""

import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any

import torch

from tests.federated.problems import MAKERS, classes, flat, memories, mlp
from torchpisa.federated import Simulation, Timing, durable_files
from torchpisa.federated.clients.memory import FileMemoryStore

CLIENTS, ROUNDS = 30, 12


def delay(client: int, iteration: int) -> float:
    return 0.5 + (7 * client + 3 * iteration) % 11 / 4


TIMINGS = {"deadline": Timing(delay, deadline=1.5), "asynchronous": Timing(delay, enough=3)}
timing = TIMINGS["deadline"]


def simulation(memory: Path | None) -> Simulation:
    clients = classes([3 + i % 4 for i in range(CLIENTS)])
    return Simulation(
        mlp(), clients, MAKERS["SISA"](), participation=0.2, timing=timing, memory=memory
    )


def run_until(folder: Path, operation: int) -> None:
    """Continue the run, and die in the middle of its n-th operation on the disk."""
    remaining = operation

    def dies_now() -> bool:
        nonlocal remaining
        remaining -= 1
        return remaining == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    write, replace, sync = FileMemoryStore._write, durable_files.replace, os.fsync

    def watched_write(self: FileMemoryStore, position: int, content: memoryview) -> None:
        if dies_now():
            write(self, position, content[: len(content) // 2])
            die()
        write(self, position, content)

    def watched_replace(new: Path, file: Path) -> None:
        if dies_now():
            new.write_bytes(new.read_bytes()[:100])
            die()
        replace(new, file)
        (folder / "acknowledged").write_text(str(running.iteration))
        if dies_now():
            die()

    def watched_sync(descriptor: int) -> None:
        if dies_now():
            die()
        sync(descriptor)

    watched: Any = watched_write
    FileMemoryStore._write = watched  # type: ignore[method-assign]
    durable_files.replace, os.fsync = watched_replace, watched_sync
    running = simulation(folder / "memory")
    running.run(ROUNDS, checkpoint=folder / "run.pt", every=2, progress=False)


def forked(folder: Path, operation: int) -> bool:
    """Run a child process; return True if it came to the end, False if it was killed."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            run_until(folder, operation)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "a child process failed"
    return True


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    whole = simulation(None)
    whole.run(ROUNDS, progress=False)  # before forking: what it imports is imported once
    acknowledged, most_under_way = folder / "acknowledged", 0
    for kills in count():
        if forked(folder, 1 + (5 * kills) % 37):
            break
        if acknowledged.exists():
            saved = torch.load(folder / "run.pt", weights_only=True)
            assert saved["rows"][-1]["round"] >= int(acknowledged.read_text())
            most_under_way = max(most_under_way, len(saved["state"]["under_way"]))
    resumed = simulation(folder / "memory")
    resumed.run(ROUNDS, checkpoint=folder / "run.pt", progress=False)
    assert torch.equal(flat(resumed.server.weights), flat(whole.server.weights))
    assert resumed.counts == whole.counts
    assert resumed.time == whole.time
    for a, b in zip(memories(resumed), memories(whole), strict=True):
        for kind, tensors in a.items():
            assert torch.equal(flat(tensors), flat(b[kind]))
    assert most_under_way > 0, "nothing was under way when it was killed"
    print(kills)


if __name__ == "__main__":
    timing = TIMINGS[sys.argv[2]]
    main(Path(sys.argv[1]))
