"""Grids of settings to try, as the commands that tune take them."""

import argparse
from collections.abc import Sequence

__all__ = ["parse_grid"]


def parse_grid(words: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """`name=1,2,3`, several times."""
    grid = {}
    for word in words:
        name, _, values = word.partition("=")
        try:
            grid[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"--grid must look like sigma=1,2,5, got {word!r}"
            ) from None
    return grid
