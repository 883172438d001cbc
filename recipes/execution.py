"""Execute runs: each one once, with a log, and several at a time."""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.pool import end_with_parent
from recipes import logs, ranks
from recipes.datasets import CorruptFileError
from recipes.recipe import Line

__all__ = ["Runs", "print_line", "rounded"]


@dataclass(frozen=True)
class Runs:
    """Runs of one kind, with their logs in a folder.

    Attributes:
        run: does one run and yields the lines of its log; see `Recipe`.
        config: the first argument of `run`.
        plan: the second argument, settings, by the name of the run.
        folder: the folder of the logs.
        options: the other arguments, by keyword.
        run_key: together with the settings, what a log must have been made with to be used.
        jobs: processes that do runs at the same time.
        length: returns the number of lines that a run logs, from its settings; None if it is not
            known.
        deadline: in `time.time()`'s seconds. A run that is not done then stops at its next line,
            without an end in its log, and none is started after it. None for no limit.
        tensorboard: folder for TensorBoard's files, a folder in it per run; None for none.
        packages: packages, besides torch and torchpisa, whose versions are logged.
    """

    run: Callable[..., Iterator[Line]]
    config: Any
    plan: Mapping[str, Any]
    folder: Path
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run_key: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    jobs: int = 1
    length: Callable[[Any], int] | None = None
    deadline: float | None = None
    tensorboard: Path | None = None
    packages: tuple[str, ...] = ()

    def key(self, name: str) -> dict[str, Any]:
        """Return the identity of a run, after a round trip through JSON, as logs hold it."""
        key = {"config": self.run_key, "settings": dataclasses.asdict(self.plan[name])}
        return json.loads(json.dumps(key))

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def log(self, name: str) -> dict[str, Any] | None:
        """Return the log of a run if it is finished, else None."""
        return logs.read(self.path(name), **self.key(name))

    def run_missing(self, names: list[str]) -> None:
        """Do the runs that are not finished.

        Raises:
            RuntimeError: runs failed; the others were done before it is raised.
            OSError, CorruptFileError: runs failed for want of data or of room on the disk.
            BlockingIOError: another command is doing one of the runs; none was begun.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        places = {name: f"{i}/{len(names)} {name}" for i, name in enumerate(names, start=1)}
        missing = []
        for name, label in places.items():
            if self.log(name) is not None:
                print_line(f"{label}: in the log")
            else:
                missing.append(name)
        missing = ranks.agree(missing)
        logged = missing if ranks.rank() == 0 else []  # the first process keeps the logs
        with logs.reserved(self.folder, logged):
            if self.jobs > 1 and missing:
                failed = self.run_in_processes(missing, places)
            else:
                failed = self.run_in_turn(missing, places)
        if failed:
            first = next(iter(failed.values()))
            if isinstance(first, OSError | CorruptFileError):  # its message says it all
                raise first
            raise RuntimeError(f"{len(failed)} runs failed: {', '.join(failed)}") from first

    def run_in_turn(self, names: list[str], places: dict[str, str]) -> dict[str, BaseException]:
        """Do runs one after the other in this process; return the failures."""
        failed: dict[str, BaseException] = {}
        for name in names:
            try:
                self.run_one(name, Progress(places[name], self.expected_lines(name)))
            except (OSError, CorruptFileError):  # the others would fail likewise
                raise
            except Exception as error:
                failed[name] = error
                print_line(f"{places[name]}: {error!r}")
            else:
                self.announce(name, places[name])
        return failed

    def run_in_processes(
        self, names: list[str], places: dict[str, str]
    ) -> dict[str, BaseException]:
        """Do runs in several processes; return the failures."""
        failed: dict[str, BaseException] = {}
        for name in names:  # logs of an earlier command are no progress of this one
            self.path(name).unlink(missing_ok=True)
        overall = OverallProgress(
            {name: (self.path(name), self.expected_lines(name)) for name in names}
        )
        others = active_children()
        # Spawned, because a forked process cannot use a GPU that its parent has used.
        with ProcessPoolExecutor(
            min(self.jobs, len(names)), get_context("spawn"), start_worker, (self.jobs,)
        ) as pool:
            futures: dict[Future[None], str] = {}
            for name in names:
                only_this = dataclasses.replace(self, plan={name: self.plan[name]}, length=None)
                futures[pool.submit(only_this.run_one, name)] = name
            try:
                while futures:
                    done, _ = wait(futures, overall.pause, FIRST_COMPLETED)
                    for future in done:
                        name, error = futures.pop(future), future.exception()
                        if error is None:
                            self.announce(name, places[name])
                        else:
                            failed[name] = error
                            print_line(f"{places[name]}: {error!r}")
                    overall.show()
            except KeyboardInterrupt:
                for worker in set(active_children()) - set(others):
                    worker.kill()  # or the pool would wait for the runs under way
                raise
        return failed

    def expected_lines(self, name: str) -> int | None:
        return None if self.length is None else self.length(self.plan[name])

    def run_one(self, name: str, report: Callable[[Line], None] = lambda line: None) -> None:
        """Do one run, in this process."""
        if is_over(self.deadline):
            return
        if ranks.rank():  # the first process keeps the log
            with contextlib.suppress(TimeLimitError):
                for _ in until_deadline(
                    self.run(self.config, self.plan[name], **self.options), self.deadline
                ):
                    pass
            return
        header = {
            **self.key(name),
            "versions": environment.versions(*self.packages),
            "hardware": environment.hardware(self.options.get("device", "cpu")),
        }
        lines = self.run(self.config, self.plan[name], **self.options)
        with contextlib.ExitStack() as stack:
            if self.tensorboard is not None:
                board = stack.enter_context(logs.TensorBoardLog(self.tensorboard / name))
                report = tee(report, board)
            stack.enter_context(contextlib.suppress(TimeLimitError))
            logs.record(self.path(name), header, until_deadline(lines, self.deadline), report)

    def announce(self, name: str, label: str) -> None:
        run = self.log(name)
        if run is not None:
            remark = ", diverged" if run.get("diverged", [False])[-1] else ""
            print_line(f"{label}: {run['seconds']:.1f} s{remark}")
        elif self.deadline is not None:
            print_line(f"{label}: not done within the time limit")
        else:
            print_line(f"{label}: its log is damaged; does another command write to {self.folder}?")


class TimeLimitError(Exception):
    """The end of a run at its time limit."""


def until_deadline(lines: Iterator[Line], deadline: float | None) -> Iterator[Line]:
    """Yield the lines until the deadline has passed; then raise TimeLimitError."""
    for line in lines:
        yield line
        if is_over(deadline):
            if isinstance(lines, Generator):
                lines.close()  # which saves a checkpoint
            raise TimeLimitError


def is_over(deadline: float | None) -> bool:
    """Return whether the deadline has passed, by the clock of the first process."""
    return deadline is not None and bool(ranks.agree(time.time() > deadline))


def tee(first: Callable[[Line], None], second: Callable[[Line], None]) -> Callable[[Line], None]:
    def report(line: Line) -> None:
        first(line)
        second(line)

    return report


def start_worker(jobs: int) -> None:
    """Prepare one of several processes that do runs."""
    end_with_parent()
    share_threads(jobs)


def share_threads(jobs: int) -> None:
    """Limit the threads of one of several processes, so that together they use every core once."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // jobs))


class Progress:
    """A line on a terminal that is rewritten with every line of the log.

    Args:
        label: the beginning of the line.
        total: number of lines that the run will log; without it there is no bar.
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label, self.total, self.seen = label, total, 0
        self.start = time.monotonic()

    def __call__(self, line: Line) -> None:
        self.seen += 1
        if sys.stdout.isatty():
            numbers = "  ".join(
                f"{name} {'-' if value is None else format(value, '.4g')}"
                for name, value in line.items()
            )
            progress = ""
            if self.total:
                progress = progress_text(self.seen, self.total, time.monotonic() - self.start)
            print_line(f"{self.label}: {progress}{numbers}", end="\r")


class OverallProgress:
    """The progress of runs in other processes, from the lengths of their logs.

    Args:
        logs: path and number of lines in the end, or None, by the name of the run.
    """

    def __init__(self, logs: Mapping[str, tuple[Path, int | None]]) -> None:
        self.logs = dict(logs)
        self.has_totals = all(total is not None for _, total in logs.values())
        self.start = time.monotonic()

    @property
    def pause(self) -> float | None:
        """Return the seconds between two updates, or None without a terminal."""
        return 1.0 if self.has_totals and sys.stdout.isatty() else None

    def show(self) -> None:
        if self.pause is not None:
            done = sum(logged_lines(path) for path, _ in self.logs.values())
            total = sum(total or 0 for _, total in self.logs.values())
            print_line(progress_text(done, total, time.monotonic() - self.start), end="\r")


def logged_lines(path: Path) -> int:
    """Return the number of lines that a run has logged so far, without header and end."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return max(0, text.count("\n") - 1 - text.count('{"seconds"'))


def progress_text(done: int, total: int, seconds: float, width: int = 20) -> str:
    """Return a bar, the counts and an estimate of the time that is left."""
    full = round(width * done / total)
    left = f"{format_duration(seconds * (total - done) / done)} left" if done else "-:-- left"
    return f"[{'#' * full}{'.' * (width - full)}] {done}/{total}, {left}  "


def format_duration(seconds: float) -> str:
    """Return hours, minutes and seconds as text."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_line(text: str, end: str = "\n") -> None:
    """Print in place of the last progress line, if any; of several processes, the first prints."""
    if ranks.rank():
        return
    print(f"\x1b[2K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


def rounded(value: Any) -> Any:
    """Round the floats of a column to four digits."""
    if not isinstance(value, list):
        return value
    return [float(f"{entry:.4g}") if isinstance(entry, float) else entry for entry in value]
