"""Work in processes of one thread each, with one JSON line per result."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import environment

__all__ = ["append_lines", "end_with_parent", "read_lines"]

Item = TypeVar("Item")
Line = dict[str, Any]


def end_with_parent() -> None:
    """Let this process end as soon as the one that started it is gone.

    A signal may leave that one no time to end the others, which would wait for work for ever.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a file, none if it is not there; without one that was cut off."""
    lines = []
    for text in path.read_text().splitlines() if path.is_file() else []:
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:  # the machine went away while it was written
            continue
    return lines


def append_lines(
    work: Callable[[Item], Line],
    items: Iterable[Item],
    path: Path,
    jobs: int,
    limit_seconds: float = math.inf,
    describe: Callable[[Line], str] = str,
) -> int:
    """Work on items, append a line for each to a file, and return how many were left undone.

    Args:
        work: makes a line from an item, in another process.
        items: the items, in the order in which they are begun.
        path: the file.
        jobs: processes.
        limit_seconds: after which nothing is begun.
        describe: makes what is printed from a line.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes: there is one per core
    start, waiting = time.monotonic(), list(items)
    total, done, running = len(waiting), 0, set[Future[Line]]()
    where = {"cpu": environment.device_name("cpu"), "versions": environment.versions()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.is_file() and not path.read_bytes().endswith(b"\n")
    with (
        path.open("a") as file,
        ProcessPoolExecutor(
            min(jobs, max(1, total)), get_context("spawn"), end_with_parent
        ) as pool,
    ):
        file.write("\n" if torn else "")
        while running or waiting:
            late = time.monotonic() - start > limit_seconds
            while waiting and not late and len(running) < jobs:
                running.add(pool.submit(work, waiting.pop(0)))
            if not running:
                break
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                line = future.result()
                file.write(json.dumps({**line, **where}) + "\n")
                file.flush()
                done += 1
                print(f"{done}/{total} {describe(line)}", flush=True)
    return len(waiting)
