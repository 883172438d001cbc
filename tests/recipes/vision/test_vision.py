"""Models, images, runs on digits, ImageNet's folders, and what is said of wrong data."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from recipes import __main__ as command
from recipes import datasets
from recipes.optimizers import missing_requirement
from recipes.training import run_training
from recipes.vision import RECIPE, imagenet
from recipes.vision.config import PRESETS, Config, Settings, Task, choices, plan
from recipes.vision.data import PADDING, augment, load
from recipes.vision.models import MODELS, build
from recipes.vision.paper import TABLE
from recipes.vision.run import VisionTraining

QUICK = PRESETS["quick"]
TINY = dataclasses.replace(QUICK, limit=16, width=0.0625)


def tiny(name: str, model: str = "vgg11", epochs: int = 4, batch: int = 16) -> Settings:
    config = dataclasses.replace(TINY, tasks=(Task(model, (name,), epochs, batch=batch),))
    (only,) = plan(config).values()
    return only


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "elapsed"} for line in lines]


# Models


@pytest.mark.parametrize(
    ("dataset", "model", "classes", "count"),
    [
        ("cifar10", "vgg11", 10, 9_750_922),
        ("cifar10", "resnet34", 10, 21_282_122),
        ("cifar10", "densenet121", 10, 6_956_298),
        ("imagenet", "resnet18", 1000, 11_689_512),
        ("imagenet", "vit_b_16", 1000, 86_567_656),
        ("imagenet", "alexnet", 1000, 61_100_840),
        ("imagenet", "densenet121", 1000, 7_978_856),
    ],
)
def test_models_have_their_known_sizes(dataset: str, model: str, classes: int, count: int) -> None:
    with torch.device("meta"):
        made = MODELS[dataset, model](classes, 1.0)
        pixels = 32 if dataset == "cifar10" else 224
        assert made(torch.empty(2, 3, pixels, pixels)).shape == (2, classes)
    assert sum(param.numel() for param in made.parameters()) == count


def test_weights_are_the_seeds() -> None:
    a, b, c = (build("cifar10", "vgg11", 10, 0.125, seed) for seed in (1, 1, 2))
    assert torch.equal(a[0].weight, b[0].weight)
    assert not torch.equal(a[0].weight, c[0].weight)
    with pytest.raises(
        ValueError, match=r"model must be one of vgg11, .* for cifar10, got 'vgg99'"
    ):
        build("cifar10", "vgg99", 10, 1.0, 0)


# Images


def test_augmentation_is_a_crop_and_perhaps_a_mirror() -> None:
    images = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8)
    made = augment(images, torch.Generator().manual_seed(0))
    assert made.shape == images.shape
    offsets, mirrors = set(), 0
    for image, result in zip(images, made, strict=True):
        padded = torch.nn.functional.pad(image, (PADDING,) * 4)
        places = [
            (top, left, mirrored)
            for top in range(2 * PADDING + 1)
            for left in range(2 * PADDING + 1)
            for mirrored in (False, True)
            if torch.equal(
                result,
                padded[:, top : top + 8, left : left + 8].flip(2)
                if mirrored
                else padded[:, top : top + 8, left : left + 8],
            )
        ]
        assert len(places) == 1
        offsets.add(places[0][:2])
        mirrors += places[0][2]
    assert len(offsets) > 30
    assert 20 < mirrors < 44


def test_epochs_are_shuffled_and_repeatable() -> None:
    data = load("digits", None, "cpu", 16)
    assert data.train.shape == (160, 3, 32, 32)
    first, again, other = (
        torch.cat([labels for _, labels in data.batches(48, 16, 0, epoch)]) for epoch in (0, 0, 1)
    )
    assert len(first) == 144  # whole batches only
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    x = data.normalise(data.train)
    assert x.mean().item() == pytest.approx(0, abs=0.1)
    assert x.std().item() == pytest.approx(1, abs=0.1)


# Runs


def test_quick_preset_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vision", "--out", str(tmp_path), "--data", str(tmp_path), "--device", "cpu"]
    command.main(words)
    output = capsys.readouterr().out
    assert output.startswith(f"cifar10 is not in {tmp_path}: digits take its place\n")
    assert "FAILS" not in output
    results = json.loads((tmp_path / "vision.json").read_text(encoding="utf-8"))
    runs = results["runs"]
    assert runs["vgg11_adam_e8_seed0"]["last"] > 25  # of ten classes
    for name in ("resnet34_sisa_e2_seed0", "resnet34_misa_e2_seed0"):
        assert runs[name]["accuracy"][-1] > 0.5
    assert all(run["digits"] for run in runs.values())
    assert (tmp_path / "vision.svg").stat().st_size > 1000
    assert "| SISA | m 4, sigma 0.1, rho 5000" in (tmp_path / "vision.md").read_text("utf-8")


@pytest.mark.parametrize("name", ["sisa", "misa", "sgd", "adabelief", "muon"])
def test_a_stopped_run_ends_like_one_that_was_not(name: str, tmp_path: Path) -> None:
    reason = missing_requirement(name)
    if reason is not None:
        pytest.skip(reason)
    settings = tiny(name)
    cpu = torch.device("cpu")
    whole = VisionTraining(settings, cpu, None)
    lines = list(run_training(whole, None))
    begun = run_training(VisionTraining(settings, cpu, None), tmp_path, save_every=1)
    next(begun)
    next(begun)
    resumed = VisionTraining(settings, cpu, None)
    again = list(run_training(resumed, tmp_path))
    assert untimed(again) == untimed(lines)
    for a, b in zip(
        whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)


def test_sisa_steps_once_per_part(monkeypatch: pytest.MonkeyPatch) -> None:
    training = VisionTraining(tiny("sisa"), torch.device("cpu"), None)
    assert training.settings.choice.batches == 4
    steps = []
    step = training.optimizer.step
    monkeypatch.setattr(training.optimizer, "step", lambda: steps.append(1) or step())
    training.advance()
    assert len(steps) == 4 * training.rounds
    assert training.optimizer.iteration == training.rounds


def test_a_loss_that_is_not_finite_ends_the_run() -> None:
    settings = tiny("sgd")
    settings = dataclasses.replace(
        settings, choice=dataclasses.replace(settings.choice, options={"lr": 1e30})
    )
    lines = list(run_training(VisionTraining(settings, torch.device("cpu"), None), None))
    assert len(lines) < settings.epochs
    assert lines[-1]["diverged"]
    assert lines[-1]["loss"] is None
    json.dumps(lines)


def test_batches_must_fit() -> None:
    with pytest.raises(ValueError, match="batch must be a multiple of batches, 4, got 18"):
        tiny("sisa", batch=18)
    with pytest.raises(ValueError, match="at most the number of training images, 160, got 500"):
        VisionTraining(tiny("sgd", batch=500), torch.device("cpu"), None)


def test_short_and_paper_are_what_the_issue_of_fairness_asks() -> None:
    short = plan(PRESETS["short"])
    assert len({run.schedule for run in short.values()}) == 1
    assert {run.batch for run in short.values()} == {128}
    names = {"sisa", "misa", "sgd", "adam", "adamw", "adabelief", "muon"}
    for seed in range(3):
        of_seed = [run for run in short.values() if (run.model, run.seed) == ("vgg11", seed)]
        assert {run.choice.label for run in of_seed} == {*names, "misa_adam_rate"}
        assert {run.epochs for run in of_seed} == {30}
    paper = plan(PRESETS["paper"])
    for model in ("vgg11", "resnet34", "densenet121"):
        labels = {run.choice.label for run in paper.values() if run.model == model}
        assert set(TABLE[model]) <= labels
    assert {run.epochs for run in paper.values()} == {200}
    assert paper["densenet121_sisa_e200_seed0"].batch == 4 * 64


def test_reports_of_full_data_stand_beside_the_paper() -> None:
    config = dataclasses.asdict(PRESETS["paper"])
    base: dict[str, Any] = {
        **{"versions": {"torch": "2"}, "hardware": {"gpu": "GPU", "cpu": "CPU"}, "seconds": 60.0},
        **{"digits": False, "epoch_seconds": 1.0, "loss": [0.5], "epoch": [200]},
        **{"test_accuracy": [0.9], "diverged": False},
    }
    runs = {}
    for name, last in (("sisa_steps", 91.1), ("sisa", 90.0), ("adam", 88.0), ("sgd", 91.5)):
        settings = plan(PRESETS["paper"])[f"vgg11_{name}_e200_seed0"]
        saved = json.loads(json.dumps(dataclasses.asdict(settings)))
        runs[name] = {**base, "settings": saved, "last": last, "best": last}
    results = {"config": config, "runs": runs, "missing": ["other"]}
    checks = RECIPE.check(results)
    assert [check.holds for check in checks] == [True, True, True]
    runs["sisa_steps"]["last"] = 90.9
    assert [check.holds for check in RECIPE.check(results)] == [False, True, True]
    assert RECIPE.report is not None
    text = RECIPE.report(results)
    assert "| SGD |" in text
    assert "In the paper only: AdaBound 90.62, RAdam 89.30, MSVAG 90.24" in text
    assert "**DenseNet-121**\n\nIn the paper only: SISA 95.77, SGD 95.47" in text
    assert "| 91.51 |" in text
    assert "4 of 5 runs" in text


def test_steps_are_those_of_the_published_scripts() -> None:
    """The rules as the scripts write them, epoch by epoch."""
    scripts = {
        "vgg11": lambda e: (
            0.9 ** ((e % 5 == 0 and 21 < e < 61) + (e % 10 == 0 and 0 < e < 21))
            * 0.9 ** (e % 10 == 0 and 61 < e < 150)
            * 0.35 ** (e % 25 == 0 and e > 100)
        ),
        "resnet34": lambda e: (
            0.85 ** ((e % 3 == 0 and 4 < e < 61) + (e % 10 == 0 and 61 < e < 99))
            * 0.5 ** (e % 25 == 0 and e > 99)
        ),
        "densenet121": lambda e: 0.25 ** (e % 50 == 0 and e > 0),
    }
    for model, factor in scripts.items():
        (choice,) = choices("cifar10", model, ["sisa_steps"])
        assert choice.schedule is not None
        assert "gamma" not in choice.options
        expected = 1.0
        for epoch in range(200):
            expected *= factor(epoch)
            assert choice.schedule.factor(epoch, 200) == pytest.approx(expected), (model, epoch)


def test_script_scale_keeps_what_the_published_update_does() -> None:
    """Its long-run step and its momentum, where rho's part is large beside sigma."""
    (choice,) = choices("cifar10", "vgg11", ["sisa_script"])
    sigma, rho, norm, root = 4.5, 3e4, 0.41, 0.02
    dual = 0.0
    moves, duals = [], []
    for _ in range(4000):  # the script's local step, dual and consensus with the gradient 1
        d = -(1 + dual) / (sigma * norm + rho * norm * root)
        dual += sigma * d
        moves.append(d + dual / (norm * sigma))
        duals.append(dual)
    ours = choice.options
    assert -moves[-1] == pytest.approx(1 / ours["sigma"], rel=1e-3)
    theirs = (1 + duals[1]) / (1 + duals[0])
    of_ours = ours["rho"] * root / (ours["sigma"] + ours["rho"] * root)
    assert 1 - theirs == pytest.approx(1 - of_ours, rel=0.02)
    assert ours["consensus_decay"] == 0
    assert choices("cifar10", "vgg11", ["sisa_steps"])[0].schedule == choice.schedule


def test_resnet18_has_the_row_that_is_for_testing_too() -> None:
    runs = plan(PRESETS["imagenet"])
    row = runs["resnet18_sisa_test_e90_seed0"].choice
    assert (row.options["sigma"], row.options["rho"]) == (1.0, 2e3)
    assert runs["resnet18_sisa_e90_seed0"].choice.options["sigma"] == 0.005
    assert row.schedule is not None
    assert [row.schedule.factor(epoch, 90) for epoch in (64, 65, 89)] == pytest.approx(
        [1, 0.15, 0.15**3]
    )
    labels = {run.choice.label for run in runs.values() if run.model == "resnet18"}
    assert set(TABLE["resnet18"]) <= labels
    assert runs["alexnet_adam_e90_seed0"].choice.options["weight_decay"] == 1e-4


# Data that is missing or damaged


def test_missing_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"cifar10: there is no cifar-10-python\.tar") as caught:
        command.main(["vision", "--preset", "short", "--data", str(tmp_path), "--runs-only"])
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(SystemExit, match=r"no images in .*imagenet/train/CLASS"):
        command.main(["vision", "--preset", "imagenet", "--data", str(tmp_path), "--runs-only"])


def test_damaged_images_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    for name in ("train_a.zip", "train_b.zip", "test.zip"):
        (folder / name).write_bytes(b"PK half of it")
    with pytest.raises(SystemExit, match=r"train_a\.zip is damaged.*get it again: Put cifar-10"):
        command.main(["vision", "--preset", "short", "--data", str(tmp_path), "--runs-only"])
    with pytest.raises(SystemExit, match=r"train_a\.zip is damaged"):
        command.main(["vision", "--data", str(tmp_path), "--runs-only"])  # nor is it replaced
    (folder / "train_a.zip").unlink()
    (folder / "cifar-10-python.tar.gz").write_bytes(b"")
    with pytest.raises(
        datasets.CorruptFileError, match=r"MD5 must be c58f30108f718f92721af3b95e74"
    ):
        datasets.verify("cifar10", tmp_path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match=r"data_batch_1 is missing"):
        datasets.verify("cifar10", tmp_path)


# ImageNet


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 8), ("val", 3)):
        for number, name in enumerate(("n01440764", "n01443537")):
            place = tmp_path / "imagenet" / part / name
            place.mkdir(parents=True)
            for index in range(count):
                noise = torch.randint(60, (40, 52, 3), generator=generator) + 150 * number
                image = Image.fromarray(noise.to(torch.uint8).numpy())
                image.save(place / f"{index}.JPEG")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0}, raising=False)  # no other process
    return tmp_path


def test_imagenet_batches_depend_on_seed_and_epoch_only(folders: Path) -> None:
    data = imagenet.load(str(folders))
    assert (data.count, data.classes) == (16, 2)
    first, again, other = (list(data.batches(8, 4, 0, epoch)) for epoch in (0, 0, 1))
    assert [images.shape for images, _ in first] == [(4, 3, 224, 224)] * 4
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    labels = torch.cat([labels for _, labels in first])
    assert labels.bincount().tolist() == [8, 8]
    bright = torch.cat([images.float().mean((1, 2, 3)) for images, _ in first])
    assert torch.equal(bright > 100, labels == 1)
    assert sum(len(labels) for _, labels in data.tests(4)) == 6


@pytest.mark.parametrize("model", ["resnet18", "vit_b_16", "alexnet", "densenet121"])
def test_imagenet_models_train_from_folders(folders: Path, model: str) -> None:
    imagenet.load.cache_clear()
    config = Config(
        "imagenet",
        (Task(model, ("adam",), 1, batch=4),),
        **{"precision": "float32", "width": 1 / 8, "limit": 4},
    )
    (settings,) = plan(config).values()
    training = VisionTraining(settings, torch.device("cpu"), str(folders))
    before = [param.detach().clone() for param in training.model.parameters()]
    line = training.advance()
    assert line["loss"] == pytest.approx(0.7, abs=0.5)
    assert 0 <= (line["test_accuracy"] or 0) <= 1
    moved = [
        not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True)
    ]
    assert sum(moved) > 0.9 * len(moved)


def test_imagenet_says_which_file_is_damaged(folders: Path) -> None:
    imagenet.load.cache_clear()
    (folders / "imagenet" / "train" / "n01440764" / "3.JPEG").write_bytes(b"no image")
    for workers in (0, 1):
        data = imagenet.load(str(folders), workers=workers)
        with pytest.raises(
            datasets.CorruptFileError,
            match=r"^[^\n]*n01440764/3\.JPEG must be an image[^\n]* Remove it or get it[^\n]*$",
        ):
            list(data.batches(16, 16, 0, 0))
    (folders / "imagenet" / "val" / "other").mkdir()
    imagenet.load.cache_clear()
    with pytest.raises(
        datasets.CorruptFileError, match="must have the classes of train, but 1 folders"
    ):
        imagenet.load(str(folders))
