"""Trainings on a GPU: captured as graphs, they learn as without."""

import dataclasses
import importlib

import pytest
import torch

from recipes.gan.config import PRESETS as GAN
from recipes.gan.config import plan as gan_plan
from recipes.gan.run import GanTraining
from recipes.rnn.config import PRESETS as RNN
from recipes.rnn.config import plan as rnn_plan
from recipes.rnn.run import RnnTraining
from recipes.vision.config import PRESETS as VISION
from recipes.vision.config import plan as vision_plan
from recipes.vision.run import VisionTraining
from torchpisa.penalty import Every

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
vision_run = importlib.import_module("recipes.vision.run")  # the package's `run` is a function


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["resnet34_sisa_e2_seed0", "resnet34_misa_e2_seed0"])
def test_vision(name: str, precision: str) -> None:
    settings = dataclasses.replace(vision_plan(VISION["quick"])[name], precision=precision)
    training = VisionTraining(settings, CUDA, "nowhere")
    lines = [training.advance() for _ in range(2)]
    assert training._round is not None
    on_cpu = VisionTraining(settings, torch.device("cpu"), "nowhere").advance()
    assert lines[0]["loss"] == pytest.approx(on_cpu["loss"], rel=0.1)
    assert lines[1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.parametrize("name", ["resnet34_sisa_e2_seed0", "resnet34_misa_e2_seed0"])
def test_captured_rounds_are_the_same_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates change from round to round, and gamma applies once."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    settings = vision_plan(VISION["quick"])[name]
    weights = []
    for rounds_before in (3, 100):
        monkeypatch.setattr(vision_run, "ROUNDS_BEFORE_GRAPH", rounds_before)
        training = VisionTraining(settings, CUDA, "nowhere")
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
        if training.gamma is not None:
            training.gamma = Every(0.5, 10)
        training.advance()
        assert (training._round is not None) == (rounds_before == 3)
        weights.append(
            torch.cat([param.detach().flatten() for param in training.model.parameters()])
        )
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("name", ["lstm1_sisa_e2_seed0", "lstm2_misa_e2_seed0"])
def test_rnn(name: str) -> None:
    training = RnnTraining(rnn_plan(RNN["quick"])[name], CUDA, "nowhere")
    lines = [training.advance() for _ in range(2)]
    assert len(training._passes) > 3  # lengths of windows
    assert all(graphed.graph is not None for graphed in training._passes.values())
    assert lines[1]["perplexity"] < 0.8 * lines[0]["perplexity"]


@pytest.mark.parametrize("name", ["lstm1_sisa_e2_seed0", "lstm2_misa_e2_seed0"])
def test_recurrent_matrices_can_stay_as_drawn(name: str) -> None:
    settings = dataclasses.replace(rnn_plan(RNN["quick"])[name], train_recurrent=False)
    training = RnnTraining(settings, CUDA, "nowhere")
    before = [layer.weight_hh_l0.clone() for layer in training.model.layers]
    lines = [training.advance() for _ in range(2)]
    assert all(graphed.graph is not None for graphed in training._passes.values())
    assert lines[1]["perplexity"] < 0.8 * lines[0]["perplexity"]
    for layer, drawn in zip(training.model.layers, before, strict=True):
        assert torch.equal(layer.weight_hh_l0, drawn)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["wgan_sisa_e4_seed0", "wgan_gp_misa_e4_seed0"])
def test_gan(name: str, precision: str) -> None:
    pytest.importorskip("torchmetrics")
    settings = dataclasses.replace(gan_plan(GAN["quick"])[name], precision=precision)
    training = GanTraining(settings, CUDA, "nowhere")
    lines = [training.advance() for _ in range(4)]
    assert all(graphed.graph is not None for graphed in training._passes.values())
    assert lines[-1]["fid_pixels"] < 0.85 * lines[0]["fid_pixels"]
