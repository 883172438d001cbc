"""Optimizers and presets by name."""

import dataclasses
import re

import pytest
import torch
from torch import nn

import torchpisa
from torchpisa.penalty import Every, WarmDown
from torchpisa.presets import PAPER_TABLE, PRESETS, PaperRow
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
    if name != "misa":
        everything = torchpisa.create(name, model(), weight_decay=0.3, decay_vectors=True)
        assert set(decays(everything).values()) == {0.3}


def test_decay_vectors_that_would_have_no_effect():
    with pytest.raises(
        ValueError, match=r"decay_vectors must be None or False for misa, .* got True"
    ):
        torchpisa.create("misa", model(), decay_vectors=True)
    torchpisa.create("misa", model(), decay_vectors=False)
    for name, value in (("sisa", False), ("pisa", True)):
        with pytest.raises(ValueError, match=f"decay_vectors needs a model, got {value} for param"):
            torchpisa.create(name, model().parameters(), decay_vectors=value)


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


# Table 5 in the paper's LaTeX, its 19 rows of SISA, each after the name that it has here.
TABLE_5 = r"""
imagenet/resnet18:    ResNet-18& 0.005 & 2e3/3 & 1 & 0 & 0 & 303 &4&4&8e$4$
imagenet/vit_b_16:    ViT-B-16& 0.005 & 2e4 & 1 & 0 & 0 & 380 &4&4&8e$4$
imagenet/alexnet:     AlexNet& 0.050 & 2e4 & 1 & 0 & 0 & 380 &4&4&8e$4$
imagenet/densenet121: DenseNet-121& 0.005 & 2e3/3 & 1 & 0 & 0 & 303 &4&4&8e$4$
cifar10/resnet34:     ResNet-34& 0.10 & 5e3 & $\gamma_\ell(0.80,15)^*$ & 5e-5 & 0 & 200&4&390&32
cifar10/vgg11:        VGG-11& 4.50 & 3e4 & $\gamma_\ell(0.90,10)$ & 2.5e-4 & 4e-4 & 200&4&390&32
cifar10/densenet121:  DenseNet-121& 0.8 & 2e3 & $\gamma_\ell(0.25,50)$ & 5e-4 & 5e-5 & 200&4&390&64
imagenet/resnet18_test: ResNet-18& 1.00 & 2e3 & 1 & 1e-2 & 5e-6 & 100 &4&5000&64
finetune/gpt2_124m:   GPT(124M)& 0.01 & 2.5e4 & $\gamma_\ell^{\star}$ & 0 & 0 & 80 &4&4&$62$
finetune/gpt2_335m:   GPT(335M)& 0.01 & 1e4 & $\gamma_\ell$ & 0 & 0 & 150 &4&4&62
rl/ant:               Ant& 5.0 & 2e4 & $\gamma_\ell$ & 0 & 0 & 100 &4&112&64
rl/humanoid:          Humanoid& 0.1 & 1e5 & $\gamma_\ell$ & 0 & 0 & 100 &4&112&64
rl/half_cheetah:      Half-Cheetah& 0.5 & 2e2 & $\gamma_\ell$ & 0 & 0 & 100 &4&117&64
rl/double_pendulum:   Pendulum& 0.5 & 2e2 & $\gamma_\ell$ & 0 & 0 & 100 &4&117&64
gan/wgan:             WGAN& 1e-1 & 1e3 & 1 & 0 & 5e-5 & 100 &4&937&16
gan/wgan_gp:          WGAN-GP& 5e-5 & 2e2 & 1 & 0 & 1e-4 & 100 &2&937&32
rnn/1:                1 layer& 0.04 & 4e2 & 1 & 1.2e-6 & 0 & 200 &4&663&5
rnn/2:                2 layer& 0.01 & 2e2/3 & 1 &  1.2e-6 & 0 & 200&4&663&5
rnn/3:                3 layer& 0.01 & 2e2/3 & 1 &  1.2e-6 & 0 & 200&4&663&5
"""


def as_printed(line: str) -> PaperRow:
    """Read a row of Table 5; beta, which the table does not have, stays at its default."""

    def number(text: str) -> float:
        top, _, bottom = text.replace("$", "").partition("/")
        return float(top) / float(bottom or 1)

    _, sigma, rho, gamma, mu, decay, *counts = line.split("&")
    steps = re.search(r"\(([\d.]+),(\d+)\)", gamma)
    return PaperRow(
        *map(number, (sigma, rho)),
        (float(steps[1]), int(steps[2])) if steps else None,
        *map(number, (mu, decay)),
        *(int(number(count)) for count in counts),
        warm_down=steps is None and "gamma" in gamma,
    )


@pytest.mark.parametrize("line", TABLE_5.strip().splitlines())
def test_rows_are_the_printed_ones(line: str) -> None:
    name, _, printed = line.partition(":")
    row = dataclasses.replace(PAPER_TABLE[name], beta=PaperRow.beta)
    assert row == as_printed(printed)
    settings = PRESETS[f"paper/{name.removeprefix('cifar10/')}"].settings
    assert settings["sigma"] == row.sigma
    assert settings["rho"] == row.rho
    assert settings["weight_decay"] == row.mu
    assert settings["consensus_decay"] == row.consensus_decay
    assert settings["batches"] == row.batches


def test_there_are_no_other_rows() -> None:
    names = [line.partition(":")[0] for line in TABLE_5.strip().splitlines()]
    assert sorted(names) == sorted(PAPER_TABLE)
    # The scripts' commands give it for VGG-11 only; elsewhere theirs is 0.999.
    assert {name for name, row in PAPER_TABLE.items() if row.beta != 0.999} == {"cifar10/vgg11"}
    assert PAPER_TABLE["cifar10/vgg11"].beta == 0.995
    gpt2 = PRESETS["paper/gpt2"].settings  # the row of NSISA, "8e1 & 1e2"
    assert (gpt2["sigma"], gpt2["rho"]) == (80, 100)


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
        ("misa", {"learning_rate": 1e-3}, r"learning_rate=0\.001 for misa; it is called lr\."),
        ("misa", {"process_group": None}, r"process_group=None for misa; .* DDP or FSDP2"),
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
