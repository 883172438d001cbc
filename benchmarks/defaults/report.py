"""Turn runs into counts, a heat map and a page.

All metrics are losses, errors or distances: less is better, and a ratio of two of them means
something. A task's score is the mean over seeds on its test data, infinite if one seed diverged;
AdamW's best of four rates is the one with the best mean over seeds on validation data. Optimizers
are compared under the same schedule.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.defaults.run import OURS, RATES, SCHEDULES, Run
from benchmarks.defaults.tasks import TASKS

__all__ = ["BEST", "USUAL", "Scores", "Standing", "draw", "overview", "page", "standing", "write"]

USUAL, BEST, MUON = "adamw-0.001", "adamw-best", "muon"
MISA_AT_USUAL = "misa-0.001"
NEAR = 1.05
NAMES = {
    "sisa": "SISA",
    "nsisa": "NSISA",
    "misa": "MISA",
    MISA_AT_USUAL: "MISA 1e-3",
    USUAL: "AdamW 1e-3",
    BEST: "AdamW, best of 4",
    MUON: "Muon + AdamW",
    "muon-rms": "Muon (RMS) + AdamW",
}
SHOWN = (*OURS, MISA_AT_USUAL, BEST, MUON, "muon-rms")  # beside AdamW at 1e-3


class Scores:
    """Means over seeds, by task, optimizer and schedule; `BEST` is an optimizer too."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: dict[tuple[str, str, str], list[Run]] = {}
        for run in sorted(runs, key=lambda run: run["seed"]):
            self._runs.setdefault((run["task"], run["optimizer"], run["schedule"]), []).append(run)
        for task in dict.fromkeys(task for task, _, _ in self._runs):
            for schedule in SCHEDULES:
                names = [f"adamw-{lr:g}" for lr in RATES]
                if all(self.has(task, name, schedule) for name in names):
                    means = [self._mean(task, name, schedule, "validation") for name in names]
                    best = names[means.index(min(means))]
                    self._runs[task, BEST, schedule] = self._runs[task, best, schedule]

    def has(self, task: str, optimizer: str, schedule: str) -> bool:
        """Tell whether there are runs."""
        return (task, optimizer, schedule) in self._runs

    def runs(self, task: str, optimizer: str, schedule: str) -> list[Run]:
        """Return the runs, one per seed."""
        return self._runs.get((task, optimizer, schedule), [])

    def test(self, task: str, optimizer: str, schedule: str) -> float:
        """Return the score: the mean on test data, infinite if a seed diverged."""
        return self._mean(task, optimizer, schedule, "test")

    def ratio(self, task: str, optimizer: str, schedule: str, reference: str = USUAL) -> float:
        """Return a score divided by that of another optimizer; below 1 is better than that."""
        score, other = (self.test(task, name, schedule) for name in (optimizer, reference))
        return score / other if math.isfinite(score) else math.inf

    def _mean(self, task: str, optimizer: str, schedule: str, split: str) -> float:
        runs = self._runs[task, optimizer, schedule]
        if any(run["diverged"] for run in runs):
            return math.inf
        return statistics.mean(run[split] for run in runs)


@dataclass(frozen=True)
class Standing:
    """The results of an optimizer on some tasks.

    Attributes:
        tasks: tasks with runs of it and of everything it is compared with.
        runs: runs of it on these tasks.
        diverged: the number of runs that diverged.
        better: on how many tasks it was better than AdamW at 1e-3.
        near: on how many it was at most 5 % behind the best of AdamW's four rates, or ahead.
        ahead: on how many it was better than Muon + AdamW.
        median: the median of its ratio to AdamW at 1e-3.
    """

    tasks: int
    runs: int
    diverged: int
    better: int
    near: int
    ahead: int
    median: float


def standing(scores: Scores, tasks: Iterable[str], optimizer: str, schedule: str) -> Standing:
    """Count how an optimizer did on some tasks, under a schedule."""
    needed = (optimizer, USUAL, BEST, MUON)
    tasks = [t for t in tasks if all(scores.has(t, name, schedule) for name in needed)]
    runs = [run for t in tasks for run in scores.runs(t, optimizer, schedule)]

    def below(reference: str, limit: float = 1.0, including: bool = False) -> int:
        ratios = [scores.ratio(t, optimizer, schedule, reference) for t in tasks]
        return sum(ratio < limit or (including and ratio == limit) for ratio in ratios)

    return Standing(
        tasks=len(tasks),
        runs=len(runs),
        diverged=sum(run["diverged"] for run in runs),
        better=below(USUAL),
        near=below(BEST, NEAR, including=True),
        ahead=below(MUON),
        median=statistics.median(
            [scores.ratio(t, optimizer, schedule) for t in tasks] or [math.nan]
        ),
    )


def overview(runs: Sequence[Run]) -> str:
    """Return the table of README.md: the tasks that decided nothing, both schedules together."""
    scores = Scores(runs)
    tasks = [name for name, task in TASKS.items() if task.half == "judge"]
    lines = [
        "| | better than AdamW at 1e-3 | within 5 % of AdamW's best of four rates "
        "| ahead of Muon + AdamW | runs that diverged |",
        "|---|---|---|---|---|",
    ]
    for optimizer, title in (("misa", "MISA"), ("sisa", "SISA"), ("nsisa", "NSISA")):
        both = [standing(scores, tasks, optimizer, schedule) for schedule in SCHEDULES]
        count = sum(each.tasks for each in both)
        cells = [
            f"{sum(getattr(each, name) for each in both)} of {count}"
            for name in ("better", "near", "ahead")
        ]
        cells.append(f"{sum(s.diverged for s in both)} of {sum(s.runs for s in both)}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# The page


def page(runs: Sequence[Run], picture: str) -> str:
    """Return the page as Markdown; `picture` is the address of the heat map."""
    scores, halves = Scores(runs), {"choose": [], "judge": []}
    for name, task in TASKS.items():
        halves[task.half].append(name)
    seeds = len({run["seed"] for run in runs})
    lines = [
        f"{len(TASKS)} small tasks, {seeds} seeds, test data apart from validation data. Settings "
        f"may be chosen on the {len(halves['choose'])} tasks of the half `choose` only; the half "
        "`judge` says how good they are. SISA, NSISA, MISA, AdamW and Muon are made from the "
        "model's parameters and nothing else but AdamW's rate; `MISA 1e-3` has AdamW's default "
        "rate instead of its own, 4e-3; `Muon + AdamW` has Muon for hidden "
        "matrices and AdamW for the rest, both at torch's defaults, `Muon (RMS)` the same with "
        "`adjust_lr_fn='match_rms_adamw'`. A run diverged if its loss or metric is not finite, or "
        "if it ends worse than it began and worse than a model that knows nothing.",
        "",
        f"![Ratio of test metrics to AdamW at 1e-3, by task and optimizer]({picture})",
    ]
    for schedule in SCHEDULES:
        lines += ["", f"**{schedule.capitalize()} learning rate**", ""]
        lines += _standings(scores, halves, schedule)
    for schedule in SCHEDULES:
        lines += ["", f"Test metrics, {schedule} learning rate, mean ± standard deviation:", ""]
        lines += _metrics(scores, schedule)
    return "\n".join([*lines, "", *_notes(runs)]) + "\n"


def _standings(scores: Scores, halves: dict[str, list[str]], schedule: str) -> list[str]:
    lines = [
        "| optimizer | tasks | runs diverged | better than AdamW 1e-3 | within 5 % of AdamW's best "
        "of four | ahead of Muon + AdamW | median ratio to AdamW 1e-3 |",
        "|---|---|---|---|---|---|---|",
    ]
    for optimizer in SHOWN:
        for half, tasks in halves.items():
            result = standing(scores, tasks, optimizer, schedule)
            if not result.tasks:
                continue
            shares = [
                f"{count} of {result.tasks} ({100 * count / result.tasks:.0f} %)"
                for count in (result.better, result.near, result.ahead)
            ]
            if optimizer in (BEST, MUON):  # not beside itself
                shares[1 if optimizer == BEST else 2] = ""
            diverged = f"{result.diverged} of {result.runs}"
            cells = [NAMES[optimizer], half, diverged, *shares, f"{result.median:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _metrics(scores: Scores, schedule: str) -> list[str]:
    columns = (USUAL, *SHOWN)
    lines = [
        f"| task | half | metric | {' | '.join(NAMES[name] for name in columns)} |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, task in TASKS.items():
        cells = [_cell(scores.runs(name, optimizer, schedule)) for optimizer in columns]
        best = scores.runs(name, BEST, schedule)
        if best:
            rate = best[0]["optimizer"].removeprefix("adamw-")
            cells[columns.index(BEST)] += f" (lr {float(rate):g})"
        lines.append(f"| {name} | {task.half} | {task.metric} | {' | '.join(cells)} |")
    return lines


def _cell(runs: list[Run]) -> str:
    if not runs:
        return ""
    diverged = sum(run["diverged"] for run in runs)
    if diverged:
        return f"{diverged} of {len(runs)} diverged"
    values = [run["test"] for run in runs]
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def _notes(runs: Sequence[Run]) -> list[str]:
    lines = ["The tasks:", ""]
    lines += [f"- `{name}` ({task.steps:,} steps): {task.about}" for name, task in TASKS.items()]
    averaged = ", ".join(f"`{name}`" for name, task in TASKS.items() if task.averaged)
    lines += ["", f"For {averaged} the mean of ten measurements counts, for the others the last."]
    problems = [run for run in runs if "error" in run]
    for run in problems:
        subject = f"{run['task']}, {run['optimizer']}, {run['schedule']}, seed {run['seed']}"
        lines.append(f"{subject} ended with an error, and counts as diverged: {run['error']}")
    machines = _machines(runs)
    processors = dict.fromkeys(machine["cpu"] for machine in machines)
    versions = dict.fromkeys(
        ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
        for machine in machines
    )
    return [*lines, "", f"One core of {', '.join(processors)}; {'; '.join(versions)}."]


def _machines(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Return the processors and versions of the runs, each pair once."""
    machines: list[dict[str, Any]] = []
    for run in runs:
        of_run = run.get("machines") or [{name: run[name] for name in ("cpu", "versions")}]
        machines += [machine for machine in of_run if machine not in machines]
    return machines


# The picture


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw the ratios to AdamW at 1e-3: a row per task, a column per optimizer."""
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    scores, names = Scores(runs), sorted(TASKS, key=lambda name: TASKS[name].half)
    # From Okabe and Ito's palette, safe for colour-blind readers; every cell has its number too.
    colours = LinearSegmentedColormap.from_list("ratio", ("#0072B2", "#ffffff", "#D55E00"))
    scale = Normalize(-1, 1)
    figure = Figure(figsize=(11, 0.36 * len(names) + 1.8), layout="constrained")
    panels = figure.subplots(1, len(SCHEDULES), sharey=True)
    for axes, schedule in zip(panels, SCHEDULES, strict=True):
        for y, task in enumerate(names):
            for x, optimizer in enumerate(SHOWN):
                if not all(scores.has(task, name, schedule) for name in (optimizer, USUAL)):
                    continue
                ratio = scores.ratio(task, optimizer, schedule)
                diverged = ratio == math.inf
                level = math.log2(max(ratio, 1e-9))  # 0 if AdamW diverged
                colour = "#333333" if diverged else colours(scale(max(-1.0, min(1.0, level))))
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=colour, linewidth=0))
                dark = diverged or abs(level) > 0.6
                text = "div." if diverged else f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
                place = {"ha": "center", "va": "center", "fontsize": 9}
                axes.text(x, y, text, color="white" if dark else "black", **place)
        boundary = sum(TASKS[name].half == "choose" for name in names) - 0.5
        axes.axhline(boundary, color="black", linewidth=1.5)
        axes.set(xlim=(-0.5, len(SHOWN) - 0.5), ylim=(len(names) - 0.5, -0.5))
        axes.set_xticks(range(len(SHOWN)), [NAMES[name] for name in SHOWN], rotation=35, ha="right")
        axes.set_yticks(range(len(names)), [f"{name} ({TASKS[name].half})" for name in names])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{schedule} learning rate", fontsize=11)
    figure.suptitle("Test metric divided by that of AdamW at 1e-3: blue is better, orange worse")
    figure.savefig(path, metadata={"Date": None})


def write(runs: Sequence[Run], folder: Path) -> None:
    """Write the runs, the page and the picture into a folder.

    Raises:
        ValueError: runs of one optimizer had different settings, so cannot be averaged.
    """
    settings: dict[str, Any] = {}
    for run in runs:
        if settings.setdefault(run["optimizer"], run["settings"]) != run["settings"]:
            raise ValueError(
                f"the runs of {run['optimizer']} have different settings, {run['settings']} and "
                f"{settings[run['optimizer']]}: train again what is not up to date"
            )
    folder.mkdir(parents=True, exist_ok=True)
    shared = ("settings", "cpu", "versions", "machines")
    saved = {
        "tasks": {t.name: {"half": t.half, "metric": t.metric} for t in TASKS.values()},
        "settings": settings,
        "machines": _machines(runs),
    }
    lines = [json.dumps({k: v for k, v in run.items() if k not in shared}) for run in runs]
    text = json.dumps(saved)[:-1] + ', "runs": [\n' + ",\n".join(lines) + "\n]}\n"
    (folder / "defaults.json").write_text(text)
    draw(runs, folder / "defaults.svg")
    (folder / "defaults.md").write_text(page(runs, "results/defaults.svg"))
