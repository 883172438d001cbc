"""Runs that are done once: logged while they go, several at a time if asked to, and resumed."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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
    """

    run: Callable[..., Iterator[Line]]
    config: Any
    plan: Mapping[str, Any]
    folder: Path
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    depends: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    jobs: int = 1

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
                self.one(name, Progress(where))
                self.tell(name, where)
        if missing:
            self.at_once(missing, places)

    def at_once(self, names: list[str], places: dict[str, str]) -> None:
        failed: dict[str, BaseException] = {}
        # Spawned, because a forked process cannot use a GPU that its parent has touched.
        with ProcessPoolExecutor(
            min(self.jobs, len(names)), get_context("spawn"), share_threads, (self.jobs,)
        ) as pool:
            futures: dict[Future[None], str] = {}
            for name in names:
                only_this = dataclasses.replace(self, plan={name: self.plan[name]})
                futures[pool.submit(only_this.one, name)] = name
            try:
                for future in as_completed(futures):
                    name, error = futures[future], future.exception()
                    if error is None:
                        self.tell(name, places[name])
                    else:
                        failed[name] = error
                        say(f"{places[name]}: {error!r}")
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failed:
            first = next(iter(failed.values()))
            raise RuntimeError(f"{len(failed)} runs failed: {', '.join(failed)}") from first

    def one(self, name: str, report: Callable[[Line], None] = lambda line: None) -> None:
        """Do one run, in whichever process this is."""
        header = {
            **self.key(name),
            "versions": environment.versions(),
            "hardware": environment.hardware(self.options.get("device", "cpu")),
        }
        lines = self.run(self.config, self.plan[name], **self.options)
        logs.record(self.path(name), header, lines, report)

    def tell(self, name: str, where: str) -> None:
        run = self.log(name)
        assert run is not None
        say(f"{where}: {run['seconds']:.1f} s")


def share_threads(jobs: int) -> None:
    """In each of several processes, so that together they use every core once."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, own // jobs))


class Progress:
    """One line on a terminal, rewritten all the time; nothing elsewhere."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, line: Line) -> None:
        if sys.stdout.isatty():
            numbers = "  ".join(
                f"{name} {'-' if value is None else format(value, '.4g')}"
                for name, value in line.items()
            )
            say(f"{self.where}: {numbers}", end="\r")


def say(text: str, end: str = "\n") -> None:
    """Print in place of the last progress line, if there is one."""
    print(f"\x1b[2K{text}" if sys.stdout.isatty() else text, end=end, flush=True)


def compact(value: Any) -> Any:
    """Four digits are enough in a column of floats."""
    if not isinstance(value, list):
        return value
    return [float(f"{entry:.4g}") if isinstance(entry, float) else entry for entry in value]
