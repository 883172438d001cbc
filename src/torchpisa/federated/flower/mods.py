"""Refuse mods of Flower that would corrupt updates."""

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["check_mods"]

_REFUSED = {
    "LocalDpMod": "privacy=GaussianNoise(clip, noise)",
    "fixedclipping_mod": "privacy=GaussianNoise(clip, noise)",
    "adaptiveclipping_mod": "privacy=GaussianNoise(clip, noise)",
    "secagg_mod": "TLS and a server that you trust",
    "secaggplus_mod": "TLS and a server that you trust",
}
"""Flower's mods that change the arrays of an answer, and what to use instead."""


def check_mods(mods: Sequence[Callable[..., Any]]) -> None:
    """Raise ValueError for a mod of Flower that would corrupt updates."""
    for mod in mods:
        name = getattr(mod, "__name__", type(mod).__name__)
        if name in _REFUSED:
            raise ValueError(
                f"mods must not change the arrays of an answer, got {name}: it takes them for "
                "weights, but clients send updates that the server sums up and that their own "
                f"memory has to match. Use {_REFUSED[name]} instead."
            )
