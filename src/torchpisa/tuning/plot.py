"""A picture of a search for sigma."""

import math
from os import PathLike
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpisa.tuning.finder import Finding

__all__ = ["draw_search"]

_COLOURS = {"steady": "#0072B2", "oscillates": "#E69F00", "diverges": "#D55E00"}


def draw_search(finding: "Finding", path: str | PathLike[str]) -> None:
    """Draw the losses at the end of the runs over sigma, and all curves, into a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "The picture needs matplotlib: pip install 'torchpisa[demo]'"
        raise ImportError(message) from error

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    start = finding.trials[0].losses[0]
    ceiling = start + abs(start)
    for verdict, colour in _COLOURS.items():
        trials = [trial for trial in finding.trials if trial.verdict == verdict]
        if trials:
            ends = [_capped(trial.losses[-1], ceiling) for trial in trials]
            left.plot([trial.sigma for trial in trials], ends, "o", color=colour, label=verdict)
    left.axvline(finding.sigma, color="0.5", lw=1, ls="--")
    left.annotate(
        f"sigma {finding.sigma:.3g}",
        (finding.sigma, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(4, 0),
        textcoords="offset points",
        va="top",
    )
    left.set(xscale="log", xlabel="sigma", ylabel="loss at the end of the run")
    left.legend(loc="best", frameon=False)
    for trial in finding.trials:
        losses = [_capped(value, ceiling) for value in trial.losses]
        best = trial.sigma == finding.sigma
        style: dict[str, Any] = {"lw": 2.5 if best else 1, "alpha": 1 if best else 0.6}
        right.plot(trial.steps, losses, color=_COLOURS[trial.verdict], **style)
    right.set(xlabel="step", ylabel="loss on the same batches")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _capped(value: float, ceiling: float) -> float:
    """Return a value cut off at `ceiling`, so that diverged runs do not hide the others."""
    return min(value, ceiling) if math.isfinite(value) else ceiling
