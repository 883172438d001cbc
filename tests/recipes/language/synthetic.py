"""Results as the recipe saves them, without the runs."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from recipes.language.config import Config, Settings, plan
from recipes.language.results import condense
from recipes.recipe import Results

__all__ = ["log", "results"]


def log(settings: Settings, last: float | None, *, gpu: str | None = "abacus") -> dict[str, Any]:
    """Return the log of a run that ended with this loss; None for one that diverged."""
    steps = list(range(0, settings.steps + 1, settings.log_every))
    if last is None:
        steps = steps[:3]
    count = len(steps)
    losses = [11.0 - i / count for i in range(count)]
    validated = [
        loss if step % settings.validate_every == 0 else None
        for step, loss in zip(steps, losses, strict=True)
    ]
    validated[-1] = last
    return {
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "versions": {"torch": "2.0"},
        "hardware": {"gpu": gpu, "cpu": "slide rule"},
        "seconds": 60.0,
        "step": steps,
        "tokens": [step * 65536 for step in steps],
        "loss": [None, *losses[1:]],
        "val_loss": validated,
        "test_loss": [*[None] * (count - 1), None if last is None else last + 0.01],
        "elapsed": [0.1 * step for step in steps],
        "optimizer_ms": [None, 90.0, *[10.0] * (count - 2)],
        "state_bytes": [0, *[1000] * (count - 1)],
        "diverged": [*[False] * (count - 1), last is None],
    }


def results(config: Config, last: Callable[[Settings], float | None]) -> Results:
    """Return all runs of a configuration."""
    runs = {name: condense(log(s, last(s))) for name, s in plan(config).items()}
    return {"config": json.loads(json.dumps(dataclasses.asdict(config))), "runs": runs}
