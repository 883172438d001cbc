"""Results as the recipe saves them, without the runs."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from recipes.heterogeneity.config import Config, Settings, plan
from recipes.heterogeneity.run import condense
from recipes.recipe import Results

__all__ = ["log", "results"]


def log(settings: Settings, accuracies: list[float]) -> dict[str, Any]:
    """Return the log of a run with these accuracies; costs grow by 10 per row."""
    rounds = [settings.every * i for i in range(len(accuracies))]
    costs = {
        name: [10 * i for i in range(len(rounds))]
        for name in ("gradients", "samples", "bytes_up", "bytes_down")
    }
    return {
        "settings": json.loads(json.dumps(dataclasses.asdict(settings))),
        "versions": {"torch": "2.0"},
        "hardware": {"gpu": None, "cpu": "abacus"},
        "seconds": 60.0,
        "round": rounds,
        "accuracy": accuracies,
        "loss": [1.0] * len(rounds),
        **costs,
    }


def results(config: Config, accuracies: Callable[[Settings], list[float]]) -> Results:
    """Return all runs of a configuration."""
    runs = {name: condense(log(s, accuracies(s))) for name, s in plan(config).items()}
    return {"config": json.loads(json.dumps(dataclasses.asdict(config))), "runs": runs}
