"""Curves of several optimizers: means over seeds, tables, and panels as in the paper's figures."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.grid import short
from recipes.optimizers import TITLES
from recipes.recipe import Check, Results
from recipes.style import COLOURS, INK, look

__all__ = ["Panel", "Run", "describe", "draw", "group", "learns", "made_with", "markdown"]
__all__ += ["mean_sd", "title"]

Run = dict[str, Any]
"""What is saved of a run."""

FAR = 5.0  # times the usual median: a curve there is one of a training that failed
LINES: list[Any] = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
SUFFIXES = {
    "sisa_steps": "SISA, published steps",
    "sisa_defaults": "SISA, defaults",
    "sisa_lr": "SISA, Adam's rate",
    "misa_adam_rate": "MISA, Adam's rate",
}


@dataclass(frozen=True)
class Panel:
    """A picture of several curves.

    Attributes:
        title: above it.
        label: of the vertical axis.
        curves: runs by optimizer.
        x: column for the horizontal axis.
        y: column for the vertical axis.
        scale: values are multiplied by it.
        log: whether the vertical axis is logarithmic.
    """

    title: str
    label: str
    curves: Mapping[str, Sequence[Run]]
    x: str
    y: str
    scale: float = 1.0
    log: bool = False


def title(label: str) -> str:
    """The name of an optimizer's runs in tables and pictures."""
    return SUFFIXES.get(label) or TITLES.get(label, label)


def group(results: Results, by: Callable[[Run], Any]) -> dict[Any, dict[str, list[Run]]]:
    """Runs by a key and by optimizer, in the order of the plan."""
    found: dict[Any, dict[str, list[Run]]] = {}
    for run in results["runs"].values():
        label = run["settings"]["choice"]["label"]
        found.setdefault(by(run), {}).setdefault(label, []).append(run)
    return found


def mean_sd(values: Iterable[float], digits: int = 2) -> str:
    """Mean and standard deviation as text; the mean alone of one value, a dash of none."""
    some = list(values)
    if not some:
        return "-"
    mean = f"{statistics.fmean(some):.{digits}f}"
    return f"{mean} ± {statistics.stdev(some):.{digits}f}" if len(some) > 1 else mean


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def describe(settings: dict[str, Any]) -> str:
    """The options that are numbers, and m."""
    choice = settings["choice"]
    words = [f"m {choice['batches']}"] if choice["batches"] > 1 else []
    for name, value in choice["options"].items():
        if name == "gamma" and isinstance(value, list):
            words.append(f"{name} {short(value[0])} every {short(value[1])} epochs")
        elif isinstance(value, list):
            words.append(f"{name} {', '.join(map(short, value))}")
        elif not isinstance(value, bool):
            words.append(f"{name} {short(value)}")
    return ", ".join(words) or "defaults"


def made_with(results: Results) -> str:
    """How many runs, how long, and on what."""
    runs = list(results["runs"].values())
    devices = dict.fromkeys(run["hardware"]["gpu"] or run["hardware"]["cpu"] for run in runs)
    versions = dict.fromkeys(run["versions"]["torch"] for run in runs)
    missing = len(results.get("missing", []))
    done = f"{len(runs)} of {len(runs) + missing} runs" if missing else f"{len(runs)} runs"
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        f"{done}, {minutes:.0f} minutes if added up, several at a time on one device; "
        f"{', '.join(devices)}, torch {', '.join(versions)}."
    )


def learns(results: Results, column: str, words: str) -> list[Check]:
    """A statement for every run: that a column falls from its first value to its last."""
    checks = []
    for name, run in results["runs"].items():
        first, last = run[column][0], run[column][-1]
        holds = None not in (first, last) and last < first
        said = " to ".join("-" if value is None else f"{value:.4g}" for value in (first, last))
        checks.append(Check(name, f"the {words} falls", f"from {said}", holds))
    return checks


def draw(rows: Sequence[Sequence[Panel]], path: Path, salt: str, x_label: str) -> None:
    """Draw panels in rows; mean over seeds and, of several, a band of one standard deviation.

    Args:
        rows: of panels, all as long as the first.
        path: of the picture.
        salt: see `recipes.style.look`.
        x_label: below all of them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = [panel for row in rows for panel in row]
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    columns = max(len(row) for row in rows)
    with look(salt):
        figure = Figure((3.4 * columns, 2.4 * len(rows) + 0.5), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, panels, strict=True):
            shown = {label: average(panel, runs) for label, runs in panel.curves.items()}
            within = limits([mean for _, mean, _ in shown.values()])
            low, high = within or (-math.inf, math.inf)
            for number, label in enumerate(labels):
                if label not in shown:
                    continue
                x, mean, deviation = shown[label]
                line = LINES[number // len(COLOURS) % len(LINES)]
                colour = COLOURS[number % len(COLOURS)]
                (handles[label],) = axes.plot(x, mean, color=colour, ls=line, lw=1.2)
                axes.fill_between(
                    *(x, [m - d for m, d in zip(mean, deviation, strict=True)]),
                    [m + d for m, d in zip(mean, deviation, strict=True)],
                    where=[
                        d > 0 and low <= m <= high for m, d in zip(mean, deviation, strict=True)
                    ],
                    **{"color": colour, "alpha": 0.2, "lw": 0},
                )
            axes.set_title(panel.title, fontsize=9)
            axes.set_ylabel(panel.label, fontsize=8)
            axes.set_yscale("log" if panel.log else "linear")
            if axes.get_xlim()[1] >= 1e4:  # 100k and not 100000, for which there is no room
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            if panel.log:  # 200 and not 2 x 10^2
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            if within is not None:
                axes.set_ylim(*within)
            axes.grid(color=INK, alpha=0.2, lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *(list(handles.values()), [title(label) for label in handles]),
            **{"loc": "outside upper center", "ncols": min(7, len(handles)), "frameon": False},
        )
        figure.supxlabel(x_label, fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def limits(curves: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The range of a panel where curves far above the others leave it; None if there are none."""
    some = [list(values) for values in curves if values]
    if not some:
        return None
    usual = FAR * statistics.median(statistics.median(values) for values in some)
    calm = [value for values in some if statistics.median(values) < usual for value in values]
    room = 0.05 * (max(calm) - min(calm))
    wild = max(max(values) for values in some) > 2 * max(calm)
    return (min(calm) - room, max(calm) + room) if wild else None


def average(panel: Panel, runs: Sequence[Run]) -> tuple[list[float], list[float], list[float]]:
    """Mean and standard deviation over the runs that got that far, where there is a value."""
    points: dict[float, list[float]] = {}
    for run in runs:
        for x, y in zip(run[panel.x], run[panel.y], strict=True):
            if y is not None and math.isfinite(y):
                points.setdefault(x, []).append(y * panel.scale)
    places = sorted(points)
    means = [statistics.fmean(points[x]) for x in places]
    spread = [statistics.stdev(points[x]) if len(points[x]) > 1 else 0.0 for x in places]
    return places, means, spread
