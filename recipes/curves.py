"""Curves of several optimizers: means over seeds, and panels as in the paper's figures."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.grid import format_value
from recipes.optimizers import TITLES
from recipes.recipe import Check, Results
from recipes.style import COLOURS, INK, figure_style
from recipes.tables import checks_table, provenance

__all__ = [
    "Panel",
    "Run",
    "check_column_falls",
    "check_sisa_is_lowest",
    "compose_report",
    "describe_settings",
    "display_name",
    "draw",
    "epoch_costs",
    "epoch_times",
    "group_runs",
    "list_not_run",
    "mean_or_inf",
    "run_facts",
]

Run = dict[str, Any]
"""The saved results of one run."""

OUTLIER_FACTOR = 5.0  # times the usual median: a curve there is one of a training that failed
LINE_STYLES: list[Any] = ["-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]
# Those of the same place in a line have one colour, those of a line one line style.
STYLE_ORDER = (
    *("sisa", "misa", "sgd", "adam", "adamw", "adabelief"),
    *("sisa_steps", "misa_adam_rate", "muon", "rmsprop", "adabound", "yogi"),
    *("sisa_defaults", "nsisa", "radam", "msvag", "lamb", "nadam"),
    *("sisa_test", "padam", "sisa_script"),
)
PERCENTAGES = (20, 30, 40, 50, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99)
VARIANT_NAMES = {
    "sisa_steps": "SISA, published steps",
    "sisa_script": "SISA, the published script's scale",
    "sisa_test": "SISA, row for testing",
    "sisa_defaults": "SISA, defaults",
    "sisa_lr": "SISA, Adam's rate",
    "misa_adam_rate": "MISA, Adam's rate",
}


@dataclass(frozen=True)
class Panel:
    """A picture of several curves.

    Attributes:
        title: above it.
        label: the label of the vertical axis.
        curves: runs by optimizer.
        x: column for the horizontal axis.
        y: column for the vertical axis.
        scale: values are multiplied by it.
        log: whether the vertical axis is logarithmic.
        percent: whether it is logarithmic in what is missing to 100, as good accuracies differ.
    """

    title: str
    label: str
    curves: Mapping[str, Sequence[Run]]
    x: str
    y: str
    scale: float = 1.0
    log: bool = False
    percent: bool = False


def display_name(label: str) -> str:
    """Return the name of an optimizer's runs in tables and pictures."""
    return VARIANT_NAMES.get(label) or TITLES.get(label, label)


def group_runs(results: Results, by: Callable[[Run], Any]) -> dict[Any, dict[str, list[Run]]]:
    """Return runs by a key and by optimizer, in the order of the plan."""
    groups: dict[Any, dict[str, list[Run]]] = {}
    for run in results["runs"].values():
        label = run["settings"]["choice"]["label"]
        groups.setdefault(by(run), {}).setdefault(label, []).append(run)
    return groups


def mean_or_inf(runs: Sequence[Run], column: str) -> float:
    """Return the mean of a number over runs; infinite if one of them has none."""
    values = [run[column] for run in runs]
    return math.inf if None in values else statistics.fmean(values)


def run_facts(log: dict[str, Any]) -> Run:
    """Return what every recipe saves of a run: settings, versions, hardware, seconds, diverged."""
    facts = {name: log[name] for name in ("settings", "versions", "hardware", "seconds")}
    return {**facts, "diverged": bool(log["diverged"][-1])}


def epoch_costs(log: dict[str, Any]) -> Run:
    """Return the seconds of an epoch and the bytes of the optimizer's state."""
    times = [b - a for a, b in zip(log["elapsed"], log["elapsed"][1:], strict=False)]
    return {
        "epoch_seconds": round(statistics.median(times or log["elapsed"]), 3),
        "state_bytes": log["state_bytes"][-1],
    }


def epoch_times(by_optimizer: Mapping[str, Sequence[Run]]) -> dict[str, str]:
    """Return the median seconds of an epoch by optimizer: on GPUs, if there are runs on GPUs."""
    gpus = any(run["hardware"]["gpu"] for runs in by_optimizer.values() for run in runs)
    times = {}
    for label, runs in by_optimizer.items():
        seconds = [run["epoch_seconds"] for run in runs if run["hardware"]["gpu"] or not gpus]
        times[label] = f"{statistics.median(seconds):.2f}" if seconds else "-"
    return times


def describe_settings(settings: dict[str, Any]) -> str:
    """Return m and the numerical options as text."""
    choice = settings["choice"]
    words = [f"m {choice['batches']}"] if choice["batches"] > 1 else []
    for name, value in choice["options"].items():
        if name == "gamma" and isinstance(value, list):
            words.append(f"{name} {format_value(value[0])} every {format_value(value[1])} epochs")
        elif name == "gamma" and isinstance(value, dict):  # WarmDown
            words.append(f"{name} 1 - 1/({value['epochs']} - epoch)")
        elif isinstance(value, list):
            words.append(f"{name} {', '.join(map(format_value, value))}")
        elif not isinstance(value, bool):
            words.append(f"{name} {format_value(value)}")
    return ", ".join(words) or "defaults"


def compose_report(results: Results, parts: Sequence[str], checks: Sequence[Check]) -> str:
    """Return the parts of a report with the statements and the line on the runs below them."""
    parts = list(parts)
    if checks:
        stated_by = "expected" if results["config"]["limit"] else "the paper"
        parts += ["**Statements**:", checks_table(checks, stated_by)]
    parts.append(provenance(results, ", several at a time on a device"))
    return "\n\n".join(parts) + "\n"


def list_not_run(paper: Mapping[str, str], labels: Iterable[str]) -> list[str]:
    """Return a line on the paper's results that have no run here, or nothing.

    Args:
        paper: the paper's results as text, by optimizer.
        labels: of the runs here; a variant of SISA counts as SISA.
    """
    ran = {label.removesuffix("_steps") for label in labels}
    others = [f"{display_name(name)} {text}" for name, text in paper.items() if name not in ran]
    return [f"In the paper only: {', '.join(others)}."] if others else []


def check_column_falls(results: Results, column: str, words: str) -> list[Check]:
    """Check for every run that a column falls from its first value to its last."""
    checks = []
    for name, run in results["runs"].items():
        first, last = run[column][0], run[column][-1]
        holds = None not in (first, last) and last < first
        values = " to ".join("-" if value is None else f"{value:.4g}" for value in (first, last))
        checks.append(Check(name, f"the {words} falls", f"from {values}", holds))
    return checks


def check_sisa_is_lowest(
    panel: str,
    runs: Mapping[str, Sequence[Run]],
    column: str,
    others: Sequence[str],
    remark: str,
) -> list[Check]:
    """Check that SISA's mean of a column is below that of each of the others that have runs."""
    means = {label: mean_or_inf(group, column) for label, group in runs.items()}
    return [
        Check(
            panel,
            f"SISA is below {display_name(other)}",
            f"{means['sisa']:.2f} and {means[other]:.2f}{remark}",
            means["sisa"] < means[other],
        )
        for other in others
        if "sisa" in means and other in means
    ]


def draw(rows: Sequence[Sequence[Panel]], path: Path, salt: str, x_label: str) -> None:
    """Draw panels in rows; mean over seeds and, of several, a band of one standard deviation.

    Args:
        rows: rows of panels, all as long as the first.
        path: the file of the picture.
        salt: see `recipes.style.look`.
        x_label: below all of them.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = [panel for row in rows for panel in row]
    labels = list(dict.fromkeys(label for panel in panels for label in panel.curves))
    styles = line_styles(labels)
    columns = max(len(row) for row in rows)
    with figure_style(salt):
        figure = Figure((3.4 * columns, 2.4 * len(rows) + 0.5), layout="constrained")
        grid = figure.subplots(len(rows), columns, squeeze=False)
        handles: dict[str, Any] = {}
        for axes, panel in zip(grid.flat, panels, strict=True):
            shown = {label: mean_curve(panel, runs) for label, runs in panel.curves.items()}
            within = outlier_limits([mean for _, mean, _ in shown.values()])
            low, high = within or (-math.inf, math.inf)
            for label in labels:
                if label not in shown:
                    continue
                x, mean, deviation = shown[label]
                colour, line = styles[label]
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
            if axes.get_xlim()[1] >= 1e4:  # 100k and not 100000, for which there is no room
                axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            if within is not None:
                axes.set_ylim(*within)
            has_points = any(mean for _, mean, _ in shown.values())  # not if all diverged at once
            if panel.log and has_points:
                scale_logarithmically(axes)
            if panel.percent and has_points:
                scale_towards_100(axes)
            axes.grid(color=INK, alpha=0.2, lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        rows_of_legend = max(1, math.ceil(len(handles) / 6))
        figure.legend(
            *(list(handles.values()), [display_name(label) for label in handles]),
            **{"loc": "outside upper center", "frameon": False},
            ncols=max(1, math.ceil(len(handles) / rows_of_legend)),
        )
        figure.supxlabel(x_label, fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def line_styles(labels: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Return colour and line style by label: in every picture the same for the usual ones."""
    free = [at for at, name in enumerate(STYLE_ORDER) if name not in labels]
    free += range(len(STYLE_ORDER), len(STYLE_ORDER) + len(labels))
    styles = {}
    for label in labels:
        at = STYLE_ORDER.index(label) if label in STYLE_ORDER else free.pop(0)
        line = LINE_STYLES[at // len(COLOURS) % len(LINE_STYLES)]
        styles[label] = COLOURS[at % len(COLOURS)], line
    return styles


def scale_logarithmically(axes: Any) -> None:
    """Make the vertical axis logarithmic, with enough ticks, as 200 and not 2 x 10^2."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = [2, 3, 5] if high > 10 * low else [1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8]
    axes.yaxis.set_minor_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")


def scale_towards_100(axes: Any) -> None:
    """Make the vertical axis logarithmic in what is missing to 100."""
    import numpy as np

    low, high = axes.dataLim.intervaly
    low, high = 100 - 1.1 * (100 - low), 100 - 0.9 * (100 - high)
    axes.set_yscale(
        "function",
        functions=(
            lambda y: -np.log10(np.maximum(100 - np.asarray(y), 1e-3)),
            lambda z: 100 - 10 ** -np.asarray(z),
        ),
    )
    axes.set_ylim(low, high)
    ticks = [tick for tick in PERCENTAGES if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])


def outlier_limits(curves: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return a range that leaves out curves far above the others, or None if there are none."""
    curves = [list(values) for values in curves if values]
    if not curves:
        return None
    usual = OUTLIER_FACTOR * statistics.median(statistics.median(values) for values in curves)
    inliers = [value for values in curves if statistics.median(values) < usual for value in values]
    room = 0.05 * (max(inliers) - min(inliers))
    has_outliers = max(max(values) for values in curves) > 2 * max(inliers)
    return (min(inliers) - room, max(inliers) + room) if has_outliers else None


def mean_curve(panel: Panel, runs: Sequence[Run]) -> tuple[list[float], list[float], list[float]]:
    """Return places, means and standard deviations over the runs that have a value there."""
    points: dict[float, list[float]] = {}
    for run in runs:
        for x, y in zip(run[panel.x], run[panel.y], strict=True):
            if y is not None and math.isfinite(y):
                points.setdefault(x, []).append(y * panel.scale)
    places = sorted(points)
    means = [statistics.fmean(points[x]) for x in places]
    spread = [statistics.stdev(points[x]) if len(points[x]) > 1 else 0.0 for x in places]
    return places, means, spread
