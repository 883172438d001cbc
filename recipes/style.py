"""The common style of the recipes' pictures."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["COLOURS", "DASHES", "INK", "figure_style"]

# Readable on white and on black, and told apart by most people who see colours differently.
COLOURS = ["#d1495b", "#e08e2b", "#8f9e2f", "#2a9d8f", "#3f88c5", "#8e6bbf"]
INK = "#808080"
DASHES = (0, (4, 3))


@contextmanager
def figure_style(salt: str) -> Iterator[None]:
    """Set matplotlib's style: glyphs as text and fixed ids, so that files are reproducible.

    Args:
        salt: salt of the ids, the recipe's name.
    """
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 8}
    settings |= {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    settings |= {"axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK}
    with matplotlib.rc_context(settings):
        yield
