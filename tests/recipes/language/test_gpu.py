"""The tiny model on a GPU."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from recipes.language.config import PRESETS, Settings, Trial, plan
from recipes.language.memory import Cell, measure
from recipes.language.optimizers import choose, missing_requirement
from recipes.language.run import LanguageTraining, run

pytestmark = pytest.mark.gpu

CONFIG = dataclasses.replace(
    PRESETS["quick"], steps=12, sequences=8, micro=4, validation=8, trials=()
)


def settings(name: str, batches: int) -> Settings:
    choice = choose(name)
    reason = missing_requirement(choice)
    if reason is not None:
        pytest.skip(reason)
    (only,) = plan(dataclasses.replace(CONFIG, trials=(Trial(choice, name, batches),))).values()
    return only


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("name", ["adamw", "muon", "sisa", "nsisa", "misa"])
def test_run_is_like_that_on_a_cpu(name: str, batches: int) -> None:
    run_settings = settings(name, batches)
    gpu, cpu = (list(run(CONFIG, run_settings, device=device))[-1] for device in ("cuda", "cpu"))
    assert gpu["val_loss"] == pytest.approx(cpu["val_loss"], rel=0.05)  # bfloat16
    assert gpu["state_bytes"] == cpu["state_bytes"]
    assert gpu["optimizer_ms"] > 0


def test_peaks_do_not_depend_on_what_was_measured_before() -> None:
    device = torch.device("cuda")
    first = measure(Cell("tiny", "adamw", micro=4), device)
    measure(Cell("tiny", "adamw", micro=64), device)
    again = measure(Cell("tiny", "adamw", micro=4), device)
    for name in ("pass_bytes", "step_bytes", "state_bytes"):
        assert first[name] == again[name] > 0
    parameters = 4 * first["parameters"]
    assert first["step_bytes"] >= 2 * parameters + first["state_bytes"]


@pytest.mark.parametrize("name", ["adamw", "sisa", "nsisa", "misa"])
def test_steps_do_not_wait_for_the_device(
    no_waiting: Callable[[], AbstractContextManager[None]], name: str
) -> None:
    training = LanguageTraining(settings(name, 4), torch.device("cuda"), None)
    for _ in range(3):  # kernels are compiled, state is built
        training.round()
    with no_waiting():
        training.round()
    assert training.line(validate=True)["optimizer_ms"] > 0
