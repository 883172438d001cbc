"""`python -m benchmarks defaults`."""

import argparse
import itertools
import math
import os
from pathlib import Path

from benchmarks import defaults
from benchmarks.defaults import data, run
from benchmarks.defaults.tasks import TASKS

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks defaults",
        description=defaults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", nargs="?", choices=("run", "prepare", "report"), default="run")
    add("--runs", type=Path, default=Path("runs/defaults.jsonl"), help="default: %(default)s")
    add(
        "--known",
        type=Path,
        action="append",
        default=[],
        metavar="FILE.json",
        help="saved results, whose runs count as done",
    )
    add("--only", choices=("choose", "judge"), help="one half of the tasks; default: both")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK")
    names = list(run.OPTIMIZERS)
    add(
        "--optimizers",
        nargs="+",
        choices=names,
        default=names,
        metavar="OPTIMIZER",
    )
    schedules = list(run.SCHEDULES)
    add("--schedules", nargs="+", choices=schedules, default=schedules)
    add("--seeds", type=int, default=3, help="default: 3")
    add("--jobs", type=int, default=os.cpu_count(), help="processes; default: one per core")
    add("--limit-seconds", type=float, default=math.inf, help="after which no run begins")
    add("--again", action="store_true", help="also what is in the file: the code has changed")
    add("--results", type=Path, default=Path("docs/results"), help="of report; %(default)s")
    args = parser.parse_args(arguments)
    for name in ("seeds", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    try:
        runs = run.read(args.runs, args.known)
    except ValueError as error:
        parser.error(str(error))
    if args.action == "prepare":
        print(data.prepare())
    elif args.action == "run":
        tasks = [name for name in args.tasks if args.only in (None, TASKS[name].half)]
        # Seed by seed, so that whoever stops early has all tasks.
        order = itertools.product(range(args.seeds), tasks, args.schedules, args.optimizers)
        keys = [run.Key(task, optimizer, schedule, k) for k, task, schedule, optimizer in order]
        todo = keys if args.again else list(run.missing(keys, runs))
        print(f"{len(todo)} of {len(keys)} runs to do, {args.jobs} at a time")
        left = run.run(todo, args.runs, args.jobs, args.limit_seconds)
        print(f"{args.runs}: {f'{left} runs left' if left else 'complete'}")
    else:
        from benchmarks.defaults import report  # draws with matplotlib

        if not runs:
            parser.error(f"--runs must be a file with runs, got {args.runs}")
        report.write(runs, args.results)
