"""SISA with the settings of `calibrate`, beside a random search over sigma and rho, on four tasks.

    python -m benchmarks.calibration --data DIR --out docs/results/calibration.json
    python -m benchmarks.calibration --show docs/results/calibration.json

The first trains, the second prints the table of saved runs and writes it beside them, as Markdown
that the page on choosing sigma and rho includes. `--explore` tries choices of lr and
momentum instead, from which the defaults of `calibrate` were chosen. DIR holds the folders `mnist`,
`ptb` and `a9a` with the original gz files; digits need scikit-learn only.
"""

import argparse
import json
import os
import random
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import torchpisa
from benchmarks import environment
from benchmarks.pool import end_with_parent
from benchmarks.tasks import STEPS, TASKS, Task, fit
from torchpisa.tuning import calibrate

TRIALS = 30
SEEDS = 3
SCALES = (1e-3, 1.0, 1e3)
# Decades from which sigma and rho are drawn, evenly on a logarithmic scale.
SIGMA, RHO = (-1.5, 1.0), (1.5, 4.5)

Run = dict[str, Any]


def random_settings(trial: int) -> dict[str, float]:
    """Return sigma and rho of a trial of the search."""
    drawn = random.Random(0)
    points = [(10 ** drawn.uniform(*SIGMA), 10 ** drawn.uniform(*RHO)) for _ in range(trial + 1)]
    return dict(zip(("sigma", "rho"), points[-1], strict=True))


class Batches:
    """The batches of a task, from the same start each time."""

    def __init__(self, task: Task, device: str, seed: int) -> None:
        self._task, self._device, self._seed = task, device, seed

    def __iter__(self) -> Any:
        generator = torch.Generator(self._device).manual_seed(self._seed)
        while True:
            yield self._task.draw(generator)


def train(
    task: str,
    kind: str,
    settings: dict[str, float],
    seed: int,
    scale: float,
    data: str,
    device: str,
) -> Run:
    """Train once, with given sigma and rho (`kind` "search") or calibrated ones."""
    used: dict[str, float] = {}

    def make(model: torch.nn.Module, task: Task, loss: Any) -> torch.optim.Optimizer:
        if kind == "search":
            used.update(settings)
        else:
            used.update(calibrate(model, loss, Batches(task, device, seed), **settings))
        return torchpisa.SISA(model.parameters(), **used)

    result = fit(task, data, device, seed, scale, make)
    del result["curve"]
    return {"kind": kind, "settings": settings, "used": used, "scale": scale, **result}


def plan(explore: bool, tasks: list[str]) -> list[tuple[Any, ...]]:
    """Return the runs that do not depend on the results of others."""
    jobs: list[tuple[Any, ...]] = []
    for task in tasks:
        if explore:
            for lr in (5e-4, 1e-3, 2e-3):
                for momentum in (0.5, 0.67, 0.8, 0.9):
                    chosen = {"lr": lr, "momentum": momentum}
                    jobs += [(task, "calibrated", chosen, seed, 1.0) for seed in range(2)]
            continue
        jobs += [(task, "search", random_settings(trial), 0, 1.0) for trial in range(TRIALS)]
        for scale in SCALES:
            jobs += [(task, "calibrated", {}, seed, scale) for seed in range(SEEDS)]
    return jobs


def best_of(runs: list[Run], task: str) -> Run:
    """Return the best run of the search, by the validation data of its only seed."""
    searched = [run for run in runs if run["task"] == task and run["kind"] == "search"]
    first = [run for run in searched if run["seed"] == 0]
    return max(first, key=lambda run: run["better"] * run["validation"])


def rows(runs: list[Run]) -> list[Run]:
    """Return the best searched and the calibrated setting by task and scale, means over seeds."""
    table_rows = []
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        best = best_of(runs, task)
        searched = [run for run in of_task if run["kind"] == "search"]
        repeated = [run for run in searched if run["used"] == best["used"]]
        reference = statistics.mean(run["validation"] for run in repeated)
        calibrated = [run for run in of_task if run["kind"] == "calibrated"]
        for scale in SCALES:
            of_scale = [run for run in calibrated if run["scale"] == scale]
            value = statistics.mean(run["validation"] for run in of_scale)
            behind = best["better"] * (reference - value)
            points = best["better"] > 0
            table_rows.append(
                {
                    "task": task,
                    "metric": best["metric"],
                    "scale": scale,
                    "search": reference,
                    "search_best_run": best["validation"],
                    "search_used": best["used"],
                    "calibrated": value,
                    "used": of_scale[0]["used"],
                    "behind": behind if points else behind / reference,
                    "holds": behind <= 1 if points else behind <= 0.02 * reference,
                }
            )
    return table_rows


def table(runs: list[Run]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| task | loss x | best of the search (sigma, rho) | calibrated (sigma, rho) | behind by |",
        "|---|---|---|---|---|",
    ]
    for row in rows(runs):
        points = row["metric"].startswith("accuracy")
        digits = 1 if points else 3
        behind = f"{row['behind']:.1f} points" if points else f"{100 * row['behind']:.1f} %"
        search, used = row["search_used"], row["used"]
        lines.append(
            f"| {row['task']}, {row['metric']} | {row['scale']:g} "
            f"| {row['search']:.{digits}f} ({search['sigma']:.2g}, {search['rho']:.0f}) "
            f"| {row['calibrated']:.{digits}f} ({used['sigma']:.2g}, {used['rho']:.0f}) "
            f"| {behind} |"
        )
    return "\n".join(lines)


def explored(runs: list[Run]) -> str:
    """Return means over seeds by choice and task, as Markdown."""
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    lines = [f"| lr | momentum | {' | '.join(tasks)} |", "|---" * (2 + len(tasks)) + "|"]
    choices = sorted({tuple(run["settings"].values()) for run in runs})
    for choice in choices:
        cells = []
        for task in tasks:
            of_task = [run for run in runs if run["task"] == task]
            scores = [r["validation"] for r in of_task if tuple(r["settings"].values()) == choice]
            cells.append(f"{statistics.mean(scores):.3f}")
        lines.append(f"| {choice[0]:g} | {choice[1]:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(saved: dict[str, Any]) -> str:
    """Return the table of a saved file, and what it was measured with."""
    if saved["explore"]:
        return explored(saved["runs"]) + "\n"
    versions = ", ".join(f"{name} {version}" for name, version in saved["versions"].items())
    steps = ", ".join(f"{task} {count:,}" for task, count in saved["steps"].items())
    return (
        f"{table(saved['runs'])}\n\nValidation metric, means over {SEEDS} seeds; the search "
        f"took its best pair by the first seed. lr decays linearly to zero over the last fifth of "
        f"{steps} steps. {saved['device']}; {versions}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", default="docs/results/calibration.json", type=Path)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--explore", action="store_true")
    parser.add_argument("--show", type=Path, help="a saved file: print its table")
    args = parser.parse_args()
    if args.show:
        if not args.show.is_file():
            parser.error(f"--show must be a file written by --out, got {args.show}")
        text = markdown(json.loads(args.show.read_text()))
        args.show.with_suffix(".md").write_text(text)
        print(text)
        return
    header = {
        "explore": args.explore,
        "steps": STEPS,
        "device": environment.device_name(args.device),
        "versions": environment.versions(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    with ProcessPoolExecutor(args.workers, get_context("spawn"), end_with_parent) as pool:

        def do(jobs: list[tuple[Any, ...]]) -> None:
            futures = [pool.submit(train, *job, args.data, args.device) for job in jobs]
            for future in as_completed(futures):
                runs.append(future.result())
                last = runs[-1]
                print(len(runs), last["task"], last["kind"], last["used"], last["validation"])
                args.out.write_text(json.dumps({**header, "runs": runs}) + "\n")

        do(plan(args.explore, args.tasks))
        if not args.explore:
            again = [(task, best_of(runs, task)["used"]) for task in args.tasks]
            do([(t, "search", s, seed, 1.0) for t, s in again for seed in range(1, SEEDS)])
    print(markdown({**header, "runs": runs}))


if __name__ == "__main__":
    main()
