"""The four panels: the objective's distance from its minimum over iterations."""

from pathlib import Path
from typing import Any

from recipes.least_squares.check import REACHED, curves
from recipes.least_squares.config import PANELS
from recipes.recipe import Results
from recipes.style import COLOURS, DASHES, INK, figure_style

__all__ = ["draw"]

BOTTOM, TOP = 1e-13, 1e5
POWERS = dict(zip((4, 8, 16, 32, 64, 128), "²³⁴⁵⁶⁷", strict=True))


def draw(results: Results, path: Path) -> None:
    """Draw two rows of two panels with the same axes."""
    from matplotlib.figure import Figure

    with figure_style("least_squares"):
        figure = Figure((8, 6.4), layout="constrained")
        every = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, letter in zip(every.flat, PANELS, strict=True):
            draw_panel(axes, results, letter)
        figure.supxlabel("iterations", fontsize=9)
        figure.supylabel("F(w) / F* − 1", fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_panel(axes: Any, results: Results, letter: str) -> None:
    # Colours go from the smallest value to the largest.
    for colour, (value, gaps) in zip(COLOURS, curves(results, letter).items(), strict=True):
        label = f"{PANELS[letter].letter} = "
        label += f"2{POWERS[value]}" if value in POWERS else f"{value:g}"
        axes.plot(gaps, color=colour, lw=1.4, label=label)
    last = len(gaps) - 1
    axes.axhline(REACHED, color=INK, lw=0.8, ls=DASHES)
    axes.set_title(f"({letter})  {PANELS[letter].title}", fontsize=9)
    axes.set(yscale="log", ylim=(BOTTOM, TOP), xlim=(0, last))
    axes.set_yticks([10.0**k for k in range(-12, 5, 4)])
    axes.minorticks_off()
    axes.grid(color=INK, alpha=0.2, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Above the start of the curves there is room: only the smallest sigma goes there, on the left.
    axes.legend(loc="upper right", ncols=2, frameon=False)
