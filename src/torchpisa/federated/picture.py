"""A picture of how labels are spread over clients."""

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from torch import Tensor

from torchpisa.data import Parts
from torchpisa.federated.partition import by_class, label_counts

__all__ = ["draw"]

# Readable on white and on black.
_COLOUR, _INK = "#3f88c5", "#808080"
# In inches: the width and height that a number needs; the bars of the totals, the gap before them,
# and what ticks and numbers need around.
_WIDE, _HIGH = 0.28, 0.12
_BAR, _GAP, _LEFT, _BOTTOM, _RIGHT, _TOP = 0.6, 0.06, 0.65, 0.5, 0.45, 0.25


def draw(
    parts: Parts,
    labels: Tensor | Sequence[int],
    path: str | PathLike[str],
    *,
    title: str | None = None,
) -> None:
    """Draw how many samples of each label each client holds.

    Clients are columns, counted from 0 as in `parts`, and labels are rows. The area of a disc is
    the number of samples; the largest fills its cell. The bars are the totals.

    Args:
        parts: the samples of each client.
        labels: one integer per sample.
        path: the file to write; its ending decides the format, such as .svg or .png.
        title: a line above the picture.

    Raises:
        ImportError: matplotlib is missing.
        TypeError: `labels` are not integers.
        ValueError: `parts` has an index beyond `labels`.

    Examples:
        >>> from torchpisa.federated.partition import dirichlet
        >>> labels = list(range(10)) * 100
        >>> draw(dirichlet(labels, 8, alpha=0.3), labels, "who.svg")  # doctest: +SKIP
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "The picture needs matplotlib: pip install 'torchpisa[demo]'"
        raise ImportError(message) from error
    names = by_class(labels)[0].tolist()
    counts = label_counts(parts, labels)
    m, C = counts.shape
    # Cells are squares, so the size of the figure follows from their number.
    cell = min(0.34, 9 / m, 9 / C)
    width, height = max(m * cell, 1.0), max(C * cell, 0.6)
    whole_width = _LEFT + width + _GAP + _BAR + _RIGHT
    whole_height = _BOTTOM + height + _GAP + _BAR + _TOP + (0.25 if title else 0)

    # Glyphs as text, no date and fixed ids: small, and the same bytes for the same parts.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "torchpisa", "font.size": 8}
    settings |= {f"{part}.color": _INK for part in ("text", "xtick", "ytick")}
    settings |= {"axes.edgecolor": _INK, "axes.labelcolor": _INK, "axes.titlecolor": _INK}
    with matplotlib.rc_context(settings):
        figure = Figure((whole_width, whole_height))

        def axes(x: float, y: float, w: float, h: float) -> Any:
            box = (x / whole_width, y / whole_height, w / whole_width, h / whole_height)
            return figure.add_axes(box)

        middle = axes(_LEFT, _BOTTOM, width, height)
        above = axes(_LEFT, _BOTTOM + height + _GAP, width, _BAR)
        beside = axes(_LEFT + width + _GAP, _BOTTOM, _BAR, height)
        _discs(middle, counts, names, width / m, height / C)
        per_client, per_label = counts.sum(1).tolist(), counts.sum(0).tolist()
        above.bar(range(m), per_client, 0.7, color=_COLOUR, alpha=0.5)
        beside.barh(range(C), per_label, 0.7, color=_COLOUR, alpha=0.5)
        above.set(xlim=(-0.5, m - 0.5), ylim=(0, max(per_client)))
        beside.set(ylim=(-0.5, C - 0.5), xlim=(0, max(per_label)))
        small = {"fontsize": 6, "textcoords": "offset points"}
        for i in _numbered(per_client, width / m >= _WIDE):
            above.annotate(f"{per_client[i]}", (i, per_client[i]), (0, 2), ha="center", **small)
        for j in _numbered(per_label, height / C >= _HIGH):
            beside.annotate(f"{per_label[j]}", (per_label[j], j), (2, 0), va="center", **small)
        for bars in (above, beside):
            bars.set_axis_off()
        if title:
            figure.text(_LEFT / whole_width, 1 - 0.1 / whole_height, title, va="top", fontsize=9)
        svg = str(path).endswith(".svg")
        figure.savefig(path, transparent=True, dpi=150, metadata={"Date": None} if svg else None)


def _numbered(totals: list[int], room: bool) -> Sequence[int]:
    """Return the bars to number: all if there is room, else the longest, as a scale."""
    return range(len(totals)) if room else [totals.index(max(totals))]


def _discs(axes: Any, counts: Tensor, names: list[int], width: float, height: float) -> None:
    """Draw one disc per client and label, in cells of `width` by `height` inches."""
    from matplotlib.collections import EllipseCollection

    held = counts.nonzero().tolist()
    # The largest has a diameter of 0.92 of the cell.
    largest = 0.92 * min(width, height) / math.sqrt(int(counts.max()))
    diameters = [largest * math.sqrt(int(counts[i, j])) for i, j in held]
    discs = EllipseCollection(
        diameters,
        diameters,
        [0.0] * len(held),
        units="inches",
        offsets=held,
        offset_transform=axes.transData,
        facecolors=_COLOUR,
        edgecolors="none",
    )
    axes.add_collection(discs)
    m, C = counts.shape
    axes.set(xlim=(-0.5, m - 0.5), ylim=(-0.5, C - 0.5), xlabel="client", ylabel="label")
    columns, rows = range(0, m, math.ceil(_WIDE / width)), range(0, C, math.ceil(_HIGH / height))
    axes.set_xticks(columns)
    axes.set_yticks(rows, [str(names[j]) for j in rows])
    axes.tick_params(length=0)
    axes.grid(color=_INK, alpha=0.2, lw=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
