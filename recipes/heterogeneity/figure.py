"""Accuracy against rounds: a row per data set, a column per number of labels."""

from pathlib import Path
from typing import Any

from recipes.heterogeneity.cells import Cell, Summary, cell_title, cells
from recipes.heterogeneity.config import ALGORITHMS, RIVALS
from recipes.heterogeneity.paper import target
from recipes.recipe import Results
from recipes.style import COLOURS, DASHES, INK, figure_style

__all__ = ["draw"]

# SISA and MISA stand out; lines differ in more than their colour.
LINE_STYLES = ["-", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (5, 2, 1, 2)), "-"]
LINE_STYLES += [(0, (8, 1))]
LINE_COLOURS = [*COLOURS, INK]
WIDTHS = [1.2, 1.2, 1.4, 1.2, 1.2, 2.0, 2.0]
STYLES = dict(zip(ALGORITHMS, zip(LINE_COLOURS, LINE_STYLES, WIDTHS, strict=True), strict=False))
# The rivals are told apart by their order in the legend, too: there are more than colours.
for number, rival in enumerate(RIVALS):
    STYLES[rival] = (COLOURS[number % len(COLOURS)], LINE_STYLES[1 + number // len(COLOURS)], 0.8)


def draw(results: Results, path: Path) -> None:
    """Draw the mean over seeds of every algorithm, and SISA's accuracy in the paper as a dashed
    line.
    """
    from matplotlib.figure import Figure

    table = cells(results)
    rows = list(dict.fromkeys(dataset for dataset, _ in table))
    columns = sorted({labels for _, labels in table})
    with figure_style("heterogeneity"):
        size = (2.7 * len(columns) + 1.2, 2.1 * len(rows) + 0.9)
        figure = Figure(size, layout="constrained")
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharey="row")
        handles: dict[str, Any] = {}
        for i, dataset in enumerate(rows):
            for j, labels in enumerate(columns):
                if (dataset, labels) in table:
                    draw_panel(grid[i][j], (dataset, labels), table[dataset, labels], handles)
                else:
                    grid[i][j].set_axis_off()
        order = [name for name in ALGORITHMS if name in handles]
        lines, names = [handles[name] for name in order], [ALGORITHMS[name] for name in order]
        place = "outside upper center"
        figure.legend(lines, names, loc=place, ncols=min(len(order), 7), frameon=False)
        figure.supxlabel("rounds", fontsize=9)
        figure.supylabel("accuracy, %", fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_panel(axes: Any, cell: Cell, row: dict[str, Summary], handles: dict[str, Any]) -> None:
    for name, (colour, line, width) in STYLES.items():
        if name in row:
            rounds, accuracy = row[name].curve()
            (handles[name],) = axes.plot(rounds, accuracy, color=colour, ls=line, lw=width)
    goal = target(*cell)
    if goal is not None:
        axes.axhline(goal, color=INK, lw=0.8, ls=DASHES)
    axes.set_title(cell_title(cell), fontsize=9)
    axes.set_xlim(left=0)
    axes.grid(color=INK, alpha=0.2, lw=0.6)
    axes.spines[["top", "right"]].set_visible(False)
