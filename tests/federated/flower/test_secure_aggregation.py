"""Secure aggregation in the installed Flower: why it cannot be used, and what it would take.

When one of these fails, Flower has changed and docs/robust.md is to be written anew.
"""

import inspect

import flwr.client.mod
import flwr.clientapp.mod
import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client.mod import secagg_mod, secaggplus_mod
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp.strategy import Strategy

from tests.federated.flower.fake import SETTING, FakeGrid, app

CLIP, LEVELS = 8.0, 2**22


@pytest.mark.parametrize("mod", [secagg_mod, secaggplus_mod])
def test_mods_are_refused(mod) -> None:
    with pytest.raises(ValueError, match="Use TLS and a server that you trust"):
        app(SETTING, mods=[mod])


def test_it_exists_for_legacy_strategies_only() -> None:
    assert "secaggplus_mod" in flwr.client.mod.__all__
    assert not [name for name in flwr.clientapp.mod.__all__ if "secagg" in name]
    workflow = SecAggPlusWorkflow(3, 2)
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        workflow(FakeGrid(), context)
    assert not any("secagg" in name.lower() for name, _ in inspect.getmembers(Strategy))


def test_its_defaults_are_those_of_the_page() -> None:
    defaults = inspect.signature(SecAggPlusWorkflow).parameters
    assert defaults["clipping_range"].default == CLIP
    assert defaults["quantization_range"].default == LEVELS
    assert defaults["max_weight"].default == 1000.0


def test_updates_survive_the_range_if_scaled_by_their_clip() -> None:
    """An entry is no larger than the norm, so clip / 8 is a scale that everybody knows."""
    rng = np.random.default_rng(0)
    for clip in (1e-3, 1.0, 1e3):
        update = rng.standard_normal(500)
        update *= clip / np.linalg.norm(update)
        scaled = dequantize(quantize([update * CLIP / clip], CLIP, LEVELS), CLIP, LEVELS)[0]
        error = np.abs(scaled * clip / CLIP - update).max()
        assert error <= 2 * clip / LEVELS
    wide = 20 * rng.standard_normal(500)
    (lost,) = dequantize(quantize([wide], CLIP, LEVELS), CLIP, LEVELS)
    assert np.abs(lost - wide).max() > 10
