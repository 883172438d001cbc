"""Trainings on a GPU: captured as graphs, they learn as without."""

import dataclasses

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

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["resnet34_sisa_e2_seed0", "resnet34_misa_e2_seed0"])
def test_vision(name: str, precision: str) -> None:
    settings = dataclasses.replace(vision_plan(VISION["quick"])[name], precision=precision)
    training = VisionTraining(settings, CUDA, "nowhere")
    lines = [training.advance() for _ in range(2)]
    assert training._pass is not None
    assert training._pass.graph is not None
    on_cpu = VisionTraining(settings, torch.device("cpu"), "nowhere").advance()
    assert lines[0]["loss"] == pytest.approx(on_cpu["loss"], rel=0.1)
    assert lines[1]["loss"] < 0.8 * lines[0]["loss"]


@pytest.mark.parametrize("name", ["lstm1_sisa_e2_seed0", "lstm2_misa_e2_seed0"])
def test_rnn(name: str) -> None:
    training = RnnTraining(rnn_plan(RNN["quick"])[name], CUDA, "nowhere")
    lines = [training.advance() for _ in range(2)]
    assert len(training._passes) > 3  # lengths of windows
    assert all(graphed.graph is not None for graphed in training._passes.values())
    assert lines[1]["perplexity"] < 0.8 * lines[0]["perplexity"]


@pytest.mark.parametrize("name", ["wgan_sisa_e4_seed0", "wgan_gp_misa_e4_seed0"])
def test_gan(name: str) -> None:
    pytest.importorskip("torchmetrics")
    training = GanTraining(gan_plan(GAN["quick"])[name], CUDA, "nowhere")
    lines = [training.advance() for _ in range(4)]
    assert all(graphed.graph is not None for graphed in training._passes.values())
    assert lines[-1]["fid_pixels"] < 0.85 * lines[0]["fid_pixels"]
