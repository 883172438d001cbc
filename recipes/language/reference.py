"""Losses of a pilot of this project, to compare new runs with; they are not the paper's.

Validation loss after 320 steps of 64 x 1024 tokens of the books, GPT-2 124M. There is no script of
it in the repository, so these are goals and not results.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PILOT", "STEP_TIME", "TOLERANCE", "Reference"]


@dataclass(frozen=True)
class Reference:
    """A loss of the pilot.

    Attributes:
        title: the optimizer and its setting.
        loss: on the validation tokens.
        name: of the optimizer in this recipe.
        options: that a run must have to be compared, besides the optimizer.
        batches: likewise; None where the pilot's number is not known.
        half: the loss half-way, where it is known.
    """

    title: str
    loss: float
    name: str
    options: Mapping[str, Any]
    batches: int | None = 1
    half: float | None = None

    def matches(self, settings: Mapping[str, Any]) -> bool:
        """Return True if a run with these saved settings is to be compared."""
        choice = settings["choice"]
        return (
            choice["name"] == self.name
            and self.batches in (None, settings["batches"])
            and all(choice["options"].get(key) == value for key, value in self.options.items())
        )


PILOT = (
    Reference("Muon, lr 0.02", 3.983, "muon", {"lr": 0.02}, half=4.377),
    Reference("NSISA, dual_decay 1/4", 4.011, "nsisa", {"dual_decay": 0.25}, None),
    Reference("NSISA, dual_decay 1", 4.062, "nsisa", {"dual_decay": 1.0}, None),
    Reference("MISA, rows normalised, nothing beside it", 3.964, "misa", {}),
    Reference("AdamW, tuned", 4.329, "adamw", {}),
)
TOLERANCE = 0.02  # a run that ends less than this above the pilot's loss is as good
STEP_TIME = 1.3  # times Muon's, what a step of ours may take at 124M on an H200
