"""Validation loss over tokens: best trials, a panel per number of batches."""

from pathlib import Path
from typing import Any

from recipes.language.optimizers import TITLES
from recipes.language.results import best, by_optimizer
from recipes.recipe import Results
from recipes.style import COLOURS, INK, figure_style

__all__ = ["COLOUR_OF", "draw"]

# Of those that other recipes have too, their colours there.
RED, ORANGE, GREEN, TEAL, BLUE, PURPLE = COLOURS
COLOUR_OF = {
    **{"sisa": RED, "misa": ORANGE, "muon": GREEN, "adamw": BLUE, "nsisa": PURPLE, "soap": TEAL},
    **{"normuon": GREEN, "soap_muon": TEAL, "shampoo": TEAL, "adam_mini": BLUE},
}

# Lines differ in more than their colour.
NAMES = ["adamw", "muon", "soap", "sisa", "nsisa", "misa"]
LINE_STYLES = [(0, (1, 1)), "-", (0, (3, 1, 1, 1)), (0, (5, 1)), (0, (5, 2, 1, 2)), "-"]
WIDTHS = [1.4, 1.2, 1.2, 1.2, 1.4, 4.0]
EXTRA_STYLE = {"misa": {"alpha": 0.4, "zorder": 1}}  # below Muon's, which it nearly meets


def draw(results: Results, path: Path) -> None:
    """Draw the best trials; the first losses are left out of the view."""
    from matplotlib.figure import Figure

    runs = by_optimizer(results)
    columns = sorted({batches for _, batches in runs})
    with figure_style("language"):
        figure = Figure((3.4 * len(columns) + 0.8, 3.0), layout="constrained")
        grid = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        handles: dict[str, Any] = {}
        ends: list[float] = []
        for axes, batches in zip(grid, columns, strict=True):
            for name, line, width in zip(NAMES, LINE_STYLES, WIDTHS, strict=True):
                if (name, batches) in runs:
                    x, y = curve(best(runs[name, batches]))
                    (handles[name],) = axes.plot(
                        *(x, y),
                        **{"color": COLOUR_OF[name], "ls": line, "lw": width},
                        **EXTRA_STYLE.get(name, {}),
                    )
                    ends += y[len(y) // 4 :]
            axes.set_title(f"m = {batches}", fontsize=9)
            axes.grid(color=INK, alpha=0.2, lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        if ends:
            room = 0.05 * (max(ends) - min(ends)) + 0.01
            grid[0].set_ylim(min(ends) - room, max(ends) + room)
        names = [TITLES[name] for name in handles]
        figure.legend(
            *(list(handles.values()), names),
            **{"loc": "outside upper center", "ncols": max(1, len(names)), "frameon": False},
        )
        figure.supxlabel("million tokens", fontsize=9)
        figure.supylabel("validation loss, nats", fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def curve(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return million tokens and losses of the validations."""
    points = zip(run["tokens"], run["val_loss"], strict=True)
    shown = [(tokens / 1e6, loss) for tokens, loss in points if loss is not None]
    return [x for x, _ in shown], [y for _, y in shown]
