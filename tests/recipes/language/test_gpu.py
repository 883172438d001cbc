"""The tiny model on a GPU."""

import dataclasses

import pytest
import torch

from recipes.language.config import PRESETS, Settings, Trial, plan
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


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["adamw", "sisa", "nsisa", "misa"])
def test_steps_do_not_wait_for_the_device(name: str) -> None:
    training = LanguageTraining(settings(name, 4), torch.device("cuda"), None)
    for _ in range(3):  # kernels are compiled, state is built
        training.round()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.line(validate=True)["optimizer_ms"] > 0
