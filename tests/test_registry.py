"""Optimizers and presets by name."""

import pytest
import torch
from torch import nn

import torchpisa
from torchpisa.penalty import Every, WarmDown
from torchpisa.presets import PAPER_TABLE, PRESETS
from torchpisa.registry import OPTIMIZERS


def model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(9, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 9)
    )


def test_lists():
    assert torchpisa.list_optimizers() == ["misa", "sisa", "nsisa", "pisa"]
    assert torchpisa.list_optimizers("*sisa") == ["sisa", "nsisa"]
    assert "paper/resnet34" in torchpisa.list_presets()
    assert len(torchpisa.list_presets("paper/imagenet/*")) == 5
    assert len(PRESETS) == len(PAPER_TABLE) + 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step(name):
    net = model()
    settings = {"sigma": 1.0, "rho": 1.0} if name == "pisa" else {}
    optimizer = torchpisa.create(name, net, **settings)
    assert type(optimizer) is OPTIMIZERS[name].cls
    net(torch.arange(9)).square().mean().backward()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, net.parameters()))
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())


def decays(optimizer: torch.optim.Optimizer, key: str = "weight_decay") -> dict[str, float]:
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("name", ["misa", "sisa", "nsisa"])
def test_vectors_do_not_decay(name):
    optimizer = torchpisa.create(name, model(), weight_decay=0.3)
    for parameter, decay in decays(optimizer).items():
        is_vector = parameter.endswith("bias") or parameter == "2.weight"
        assert decay == (0.0 if is_vector else 0.3), parameter
    everything = torchpisa.create(name, model(), weight_decay=0.3, decay_vectors=True)
    assert set(decays(everything).values()) == {0.3}


def test_embedding_and_head_are_no_hidden_matrices():
    optimizer = torchpisa.create("misa", model())
    matrices = [g["param_names"] for g in optimizer.param_groups if g["matrix"]]
    assert matrices == [["1.weight"]]
    assert decays(optimizer)["1.weight"] == 0.1  # the default of MISA


def test_parameters_are_taken_as_they_are():
    net = model()
    optimizer = torchpisa.create("sisa", net.parameters(), weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_makes_an_optimizer(preset):
    found = PRESETS[preset]
    optimizer = torchpisa.create(found.optimizer, model(), preset=preset)
    assert optimizer.batches == found.settings["batches"]
    for name, value in found.settings.items():
        if name in ("sigma", "rho"):
            value = [value] * optimizer.batches
        if name != "batches":
            assert optimizer.param_groups[0][name] == value, name


def test_the_row_of_resnet34():
    """To the number, as in the paper's table: it must never change."""
    made = PRESETS["paper/resnet34"].arguments()
    assert made == {
        **{"sigma": 0.1, "rho": 5e3, "beta": 0.999, "eps": 1e-8, "weight_decay": 5e-5},
        **{"consensus_decay": 0.0, "batches": 4, "gamma": Every(0.8, 15 * 390)},
    }
    assert PRESETS["paper/resnet34"].arguments(rounds=10)["gamma"] == Every(0.8, 150)
    assert PRESETS["paper/rl/ant"].arguments(epochs=7)["gamma"] == WarmDown(7, 112)
    assert PRESETS["paper/gan/wgan"].arguments()["gamma"] == 1.0


def test_the_paper_makes_no_difference_between_vectors_and_matrices():
    optimizer = torchpisa.create("sisa", model(), preset="paper/vgg11")
    assert set(decays(optimizer).values()) == {2.5e-4}
    assert set(decays(optimizer, "consensus_decay").values()) == {4e-4}


def test_arguments_override_a_preset():
    optimizer = torchpisa.create("sisa", model(), preset="paper/resnet34", batches=1, sigma=3.0)
    assert optimizer.batches == 1
    assert optimizer.param_groups[0]["sigma"] == [3.0]


def test_presets_are_frozen():
    with pytest.raises(TypeError):
        PRESETS["paper/resnet34"] = None  # type: ignore[index]
    with pytest.raises(TypeError):
        PRESETS["paper/resnet34"].settings["sigma"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("missa", {}, r"name must be one of misa, .*, got 'missa'; did you mean 'misa'\?"),
        ("sisa", {"preset": "paper/resnet43"}, r"got 'paper/resnet43'; did you mean 'paper/resnet"),
        ("misa", {"preset": "paper/vgg11"}, r"preset must be one of misa's, got 'paper/vgg11', wh"),
        ("misa", {"rounds": 3}, r"rounds and epochs need a preset, got 3 and None"),
        ("sisa", {"preset": "paper/vgg11", "rounds": 0}, r"rounds must be an integer >= 1, got 0"),
        ("misa", {"weight_decay": -1.0}, r"weight_decay must be a finite number >= 0, got -1\.0"),
        ("misa", {"lrr": 1.0}, r"unknown argument lrr=1\.0 for misa; did you mean 'lr'\?"),
        ("misa", {"betas": (0.9, 0.95)}, r"betas=\(0\.9, 0\.95\) for misa; .* momentum and beta"),
        ("MISA", {}, r"got 'MISA'; did you mean 'misa'\?"),
    ],
)
def test_bad_input(name, settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        torchpisa.create(name, model(), **settings)


def test_model_and_name_in_the_wrong_order():
    with pytest.raises(TypeError, match=r"name must be a string, .*, got a Sequential$"):
        torchpisa.create(model(), "misa")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", torchpisa.list_optimizers())
def test_model_without_anything_to_train(name):
    with pytest.raises(ValueError, match=r"requires gradients, got \d+ parameters that do not"):
        torchpisa.create(name, model().requires_grad_(False))
