"""Runs that are done once: logged while they go, several at a time if asked to, and resumed."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from recipes import logs
from recipes.recipe import Line

__all__ = ["Runs", "compact", "say"]


@dataclass(frozen=True)
class Runs:
    """Runs of one kind, with their logs in a folder.

    Attributes:
        run: does one run and yields what to log; see `Recipe`.
        config: the first argument of `run`.
        plan: the second, settings by the name of the run.
        folder: of the logs.
        options: the others, by keyword.
        depends: with the settings, what a finished run must have had to count as done.
        jobs: processes that do runs at the same time.
        length: lines that a run logs, from its settings, for an estimate of the time that is left;
            None where nobody knows.
        deadline: in `time.time()`'s seconds. A run that is not done then stops at its next line,
            without an end in its log, and none is started after it. None for no limit.
        board: folder for TensorBoard's files, a folder in it per run; None for none.
        packages: whose versions to log, besides torch and torchpisa.
    """

    run: Callable[..., Iterator[Line]]
    config: Any
    plan: Mapping[str, Any]
    folder: Path
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    depends: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    jobs: int = 1
    length: Callable[[Any], int] | None = None
    deadline: float | None = None
    board: Path | None = None
    packages: tuple[str, ...] = ()

    def key(self, name: str) -> dict[str, Any]:
        """Through JSON, so that it compares equal to what a log holds."""
        key = {"config": self.depends, "settings": dataclasses.asdict(self.plan[name])}
        return json.loads(json.dumps(key))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def log(self, name: str) -> dict[str, Any] | None:
        """What a finished run logged, or None."""
        return logs.read(self.path(name), **self.key(name))

    def do(self, names: list[str]) -> None:
        """Do those of these runs that are not finished.

        Raises:
            RuntimeError: runs failed in their processes; the others were done before it is raised.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        places = {name: f"{i}/{len(names)} {name}" for i, name in enumerate(names, start=1)}
        missing = []
        for name, where in places.items():
            if self.log(name) is not None:
                say(f"{where}: in the log")
            elif self.jobs > 1:
                missing.append(name)
            else:
                self.one(name, Progress(where, self.lines_of(name)))
                self.tell(name, where)
        if missing:
            self.at_once(missing, places)

    def at_once(self, names: list[str], places: dict[str, str]) -> None:
        failed: dict[str, BaseException] = {}
        for name in names:  # what an earlier command left there is no progress of this one
            self.path(name).unlink(missing_ok=True)
        overall = Overall({name: (self.path(name), self.lines_of(name)) for name in names})
        # Spawned, because a forked process cannot use a GPU that its parent has touched.
        with ProcessPoolExecutor(
            min(self.jobs, len(names)), get_context("spawn"), share_threads, (self.jobs,)
        ) as pool:
            futures: dict[Future[None], str] = {}
            for name in names:
                only_this = dataclasses.replace(self, plan={name: self.plan[name]}, length=None)
                futures[pool.submit(only_this.one, name)] = name
            try:
                while futures:
                    done, _ = wait(futures, overall.pause, FIRST_COMPLETED)
                    for future in done:
                        name, error = futures.pop(future), future.exception()
                        if error is None:
                            self.tell(name, places[name])
                        else:
                            failed[name] = error
                            say(f"{places[name]}: {error!r}")
                    overall.show()
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            first = next(iter(failed.values()))
            raise RuntimeError(f"{len(failed)} runs failed: {', '.join(failed)}") from first

    def lines_of(self, name: str) -> int | None:
        return None if self.length is None else self.length(self.plan[name])

    def one(self, name: str, report: Callable[[Line], None] = lambda line: None) -> None:
        """Do one run, in whichever process this is."""
        if self.deadline is not None and time.time() > self.deadline:
            return
        header = {
            **self.key(name),
            "versions": environment.versions(*self.packages),
            "hardware": environment.hardware(self.options.get("device", "cpu")),
        }
        lines = self.run(self.config, self.plan[name], **self.options)
        with contextlib.ExitStack() as stack:
            if self.board is not None:
                report = both(report, stack.enter_context(logs.Board(self.board / name)))
            stack.enter_context(contextlib.suppress(TimeLimitError))
            logs.record(self.path(name), header, within(lines, self.deadline), report)

    def tell(self, name: str, where: str) -> None:
        run = self.log(name)
        if run is None:
            say(f"{where}: not done within the time limit")
        else:
            say(f"{where}: {run['seconds']:.1f} s")


class TimeLimitError(Exception):
    """The time limit has passed."""


def within(lines: Iterator[Line], deadline: float | None) -> Iterator[Line]:
    """The lines until the deadline has passed; raises TimeLimitError then."""
    for line in lines:
        yield line
        if deadline is not None and time.time() > deadline:
            raise TimeLimitError


def both(first: Callable[[Line], None], second: Callable[[Line], None]) -> Callable[[Line], None]:
    def report(line: Line) -> None:
        first(line)
        second(line)

    return report


def share_threads(jobs: int) -> None:
    """In each of several processes, so that together they use every core once."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, own // jobs))


class Progress:
    """One line on a terminal, rewritten all the time; nothing elsewhere.

    Args:
        where: what the line begins with.
        total: lines that the run will log; None where nobody knows, then there is no bar.
    """

    def __init__(self, where: str, total: int | None = None) -> None:
        self.where, self.total, self.seen = where, total, 0
        self.start = time.monotonic()

    def __call__(self, line: Line) -> None:
        self.seen += 1
        if sys.stdout.isatty():
            numbers = "  ".join(
                f"{name} {'-' if value is None else format(value, '.4g')}"
                for name, value in line.items()
            )
            done = bar(self.seen, self.total, time.monotonic() - self.start) if self.total else ""
            say(f"{self.where}: {done}{numbers}", end="\r")


class Overall:
    """The same for runs in other processes, from the lengths of their logs.

    Args:
        logs: path and number of lines in the end, or None, by the name of the run.
    """

    def __init__(self, logs: Mapping[str, tuple[Path, int | None]]) -> None:
        self.logs = dict(logs)
        self.known = all(total is not None for _, total in logs.values())
        self.start = time.monotonic()

    @property
    def pause(self) -> float | None:
        """Seconds from one look to the next; None where nobody looks."""
        return 1.0 if self.known and sys.stdout.isatty() else None

    def show(self) -> None:
        if self.pause is not None:
            done = sum(lines_in(path) for path, _ in self.logs.values())
            total = sum(total or 0 for _, total in self.logs.values())
            say(bar(done, total, time.monotonic() - self.start), end="\r")


def lines_in(path: Path) -> int:
    """What a run has logged so far, without header and end."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return max(0, text.count("\n") - 1 - text.count('{"seconds"'))


def bar(done: int, total: int, seconds: float, width: int = 20) -> str:
    """How much is done, and how long the rest takes if it goes on like this."""
    full = round(width * done / total)
    left = f"{clock(seconds * (total - done) / done)} left" if done else "-:-- left"
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total}, {left}  "


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def say(text: str, end: str = "\n") -> None:
    """Print in place of the last progress line, if there is one."""
    print(f"\x1b[2K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


def compact(value: Any) -> Any:
    """Four digits are enough in a column of floats."""
    if not isinstance(value, list):
        return value
    return [float(f"{entry:.4g}") if isinstance(entry, float) else entry for entry in value]
