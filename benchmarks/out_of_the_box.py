"""SISA, NSISA and MISA with their defaults beside AdamW at its best rate, on three tasks.

    python -m benchmarks.out_of_the_box --data DIR --out docs/results/out_of_the_box.json
    python -m benchmarks.out_of_the_box --show docs/results/out_of_the_box.json

The first trains, the second prints the table and draws the curves of saved runs beside them.
`--sweep` trains grids of sigma, rho and beta instead, from which the defaults were chosen. DIR
holds the folders `mnist` and `ptb` with the original gz files; digits need scikit-learn only.

`python -m benchmarks defaults` asks the same of eighteen tasks and supersedes this script. Nothing
imports it; it stays as long as the documentation shows its results.
"""

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import torchpisa
from benchmarks import environment
from benchmarks.tasks import STEPS, TASKS, fit

ADAMW = [{"lr": lr} for lr in (3e-4, 1e-3, 3e-3, 1e-2)]


def make(name: str, model: torch.nn.Module, settings: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer by name."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), weight_decay=0.0, **settings)
    if name == "sisa":
        return torchpisa.SISA(model.parameters(), **settings)
    cls = {"nsisa": torchpisa.NSISA, "misa": torchpisa.MISA}[name]
    return cls(torchpisa.optim.param_groups.split(model), **settings)


def train(
    task_name: str, optimizer: str, settings: dict[str, Any], seed: int, data: str, device: str
) -> dict[str, Any]:
    """Train once with an optimizer by name."""
    result = fit(
        task_name, data, device, seed, 1.0, lambda model, *_: make(optimizer, model, settings)
    )
    return {"optimizer": optimizer, "settings": settings, **result}


OURS = ("sisa", "nsisa", "misa")


def plan(
    sweep: bool, tasks: list[str], seeds: int, optimizers: Sequence[str] = ("adamw", *OURS)
) -> list[tuple[Any, ...]]:
    """The runs: (task, optimizer, settings, seed)."""
    choices: list[tuple[str, dict[str, float]]]
    if sweep:
        grid = itertools.product((0.25, 0.5, 1.0), (3e2, 1e3, 3e3), (0.99, 0.999))
        choices = [("sisa", {"sigma": s, "rho": r, "beta": b}) for s, r, b in grid]
        choices += [("nsisa", {"sigma": s}) for s in (20.0, 40.0, 80.0, 160.0)]
        pairs = itertools.product((1e-4, 1e-3, 1e-2, 1e-1), (30.0, 100.0))
        choices += [("misa", {"sigma": s, "rho": r}) for s, r in pairs]
    else:
        choices = [("adamw", s) for s in ADAMW] + [(name, {}) for name in OURS]
    kept = [(name, settings) for name, settings in choices if name in optimizers]
    return [(t, o, s, k) for t in tasks for o, s in kept for k in range(seeds)]


def by_setting(runs: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    """Runs that differ in their seed only, by task, optimizer and settings."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: (run["task"], run["optimizer"], str(run["settings"]))):
        settings = ", ".join(f"{name} {value:g}" for name, value in run["settings"].items())
        groups.setdefault((run["task"], run["optimizer"], settings or "defaults"), []).append(run)
    return groups


def table(runs: list[dict[str, Any]]) -> str:
    """Mean and deviation over seeds as Markdown, a row per task, optimizer and settings."""
    rows = ["| task | optimizer | settings | validation | test |", "|---|---|---|---|---|"]
    for (task, optimizer, settings), same in by_setting(runs).items():
        cells = []
        for split in ("validation", "test"):
            values = [run[split] for run in same]
            digits = 1 if same[0]["better"] > 0 else 3
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            mean = statistics.mean(values)
            # Bits per character of a model that knows nothing are below 6.
            diverged = same[0]["better"] < 0 and mean > 6
            cells.append("diverged" if diverged else f"{mean:.{digits}f}{spread}")
        rows.append(f"| {task} | {optimizer} | {settings} | {cells[0]} | {cells[1]} |")
    return "\n".join(rows)


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Validation curves: ours with their defaults, and AdamW at each learning rate."""
    from matplotlib.figure import Figure

    colours = {"sisa": "#0072B2", "nsisa": "#D55E00", "misa": "#009E73"}
    greys = {f"lr {s['lr']:g}": str(0.75 - 0.25 * i) for i, s in enumerate(ADAMW)}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    names = list(dict.fromkeys(run["task"] for run in runs))
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        ends = []
        for (task, optimizer, settings), same in by_setting(runs).items():
            if task != name:
                continue
            steps = [point[0] for point in same[0]["curve"]]
            columns = zip(*(run["curve"] for run in same), strict=True)
            means = [statistics.mean(point[2] for point in column) for column in columns]
            label = f"{optimizer.upper().replace('ADAMW', 'AdamW')}, {settings}"
            style, width = ("--", 1.0) if optimizer == "adamw" else ("-", 2.0)
            colour = colours.get(optimizer) or greys[settings]
            axes.plot(steps, means, style, color=colour, lw=width, label=label)
            ends += means[len(means) // 4 :]
        low, high = min(ends), max(ends)
        better = same[0]["better"]
        axes.set_ylim(*((low, high + 0.1 * (high - low)) if better > 0 else (low - 0.05, high)))
        axes.set(title=name, xlabel="step", ylabel=f"validation {runs_metric(runs, name)}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def runs_metric(runs: list[dict[str, Any]], task: str) -> str:
    """Name of the metric of a task."""
    return next(str(run["metric"]) for run in runs if run["task"] == task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="data")
    parser.add_argument("--out", default="docs/results/out_of_the_box.json", type=Path)
    parser.add_argument(
        "--tasks", nargs="+", default=["mlp", "cnn", "transformer"], choices=list(TASKS)
    )
    names = ["adamw", *OURS]
    parser.add_argument("--optimizers", nargs="+", default=names, choices=names)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--show", type=Path, help="a saved file: print its table, draw its curves")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds must be >= 1, got {args.seeds}")
    if args.show:
        if not args.show.is_file():
            parser.error(f"--show must be a file written by --out, got {args.show}")
        runs = json.loads(args.show.read_text())["runs"]
        print(table(runs))
        draw(runs, args.show.with_suffix(".png"))
        return
    for task, folder in {"cnn": "mnist", "transformer": "ptb"}.items():
        if task in args.tasks and not (Path(args.data) / folder).is_dir():
            parser.error(f"--data must hold the folder {folder} for {task}, got {args.data}")
    device = environment.device_name(args.device)
    header = {"steps": STEPS, "device": device, "versions": environment.versions()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    runs = []
    with ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) as pool:
        jobs = plan(args.sweep, args.tasks, args.seeds, args.optimizers)
        futures = [pool.submit(train, *job, args.data, args.device) for job in jobs]
        for future in as_completed(futures):
            runs.append(future.result())
            last = runs[-1]
            what = f"{last['task']} {last['optimizer']} {last['settings']}"
            print(f"{len(runs)}/{len(jobs)} {what} {last['validation']:.3f}", flush=True)
            args.out.write_text(json.dumps({**header, "runs": runs}) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
