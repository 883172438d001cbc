"""The single file is the package's MISA, on one process and on two, and imports nothing else."""

import ast
import textwrap
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import torchpisa
from recipes.language import misa_single_file
from recipes.language.model import SIZES, build
from tests.distributed.processes import run
from torchpisa.optim.param_groups import split
from torchpisa.preconditioners.consensus import EigenbasisMoment, Whiten

STAGES = {
    None: None,
    "whiten": Whiten(),
    "eigenbasis": EigenbasisMoment(),
    "eigenbasis_both": EigenbasisMoment("both"),
}
SETTINGS: dict[str, Any] = {"lr": 5e-3, "momentum": 0.85, "weight_decay": 0.1}


def single(model: nn.Module, before: str | None) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for _, p in group["params"]], "matrix": group["matrix"]}
        for group in split(model, head=())
    ]
    return misa_single_file.MISA(groups, **SETTINGS, before=before)


def trained(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(256, (8, 65), generator=generator)
        optimizer.zero_grad()
        model(batch[:, :-1], batch[:, 1:]).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("before", [None, "whiten", "eigenbasis"])
def test_is_the_packages_misa(before: str | None) -> None:
    ours, its = build(SIZES["tiny"], 0).double(), build(SIZES["tiny"], 0).double()
    package = torchpisa.MISA(split(ours, head=()), **SETTINGS, before=STAGES[before])
    pairs = zip(trained(package, ours, 12), trained(single(its, before), its, 12), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("before", list(STAGES))
def test_is_the_packages_misa_for_square_matrices(before: str | None) -> None:
    """Without directions that have no gradient, of which both sides of a wide matrix have many."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(12, 2, 6, 6, generator=generator, dtype=torch.float64)
    results = []
    for cls, stage in ((torchpisa.MISA, STAGES[before]), (misa_single_file.MISA, before)):
        params = [nn.Parameter(torch.zeros(6, 6, dtype=torch.float64)) for _ in range(2)]
        optimizer = cls([{"params": params, "matrix": True}], **SETTINGS, before=stage)
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        results.append(torch.stack([param.detach() for param in params]))
    torch.testing.assert_close(*results, rtol=1e-7, atol=1e-9)


def test_is_the_packages_misa_in_float32() -> None:
    ours, its = build(SIZES["tiny"], 0), build(SIZES["tiny"], 0)
    package = torchpisa.MISA(split(ours, head=()), **SETTINGS, ns_dtype=None)
    pairs = zip(trained(package, ours, 5), trained(single(its, None), its, 5), strict=True)
    for expected, found in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def on_a_rank(before: str) -> list[Tensor]:
    model = build(SIZES["tiny"], 0)
    optimizer = single(model, before)
    weights = trained(optimizer, model, 4)
    matrices = optimizer.param_groups[0]["params"]
    ranks = distributed.get_world_size()
    assert sum(p in optimizer.state for p in matrices) == len(matrices) // ranks
    return weights


def test_processes_share_the_matrices() -> None:
    model = build(SIZES["tiny"], 0)
    expected = trained(single(model, "whiten"), model, 4)
    for weights in run(on_a_rank, 2, "whiten"):
        for found, weight in zip(weights, expected, strict=True):
            assert torch.equal(found, weight)


def test_has_the_packages_defaults() -> None:
    ours, its = (signature(cls).parameters for cls in (torchpisa.MISA, misa_single_file.MISA))
    assert set(its) <= set(ours)
    for name, parameter in its.items():
        assert parameter.default == ours[name].default, name


class Track(nn.Module):
    """A model with parameters as the public script's: names, numbers of dimensions and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4).bfloat16()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)]
        )
        self.proj = nn.Linear(4, 11)
        self.norm = nn.RMSNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).float()
        for block in self.blocks:
            x = x + block(x)
        return self.proj(self.norm(x))


def test_the_lines_of_its_docstring_train_a_model() -> None:
    lines = str(misa_single_file.__doc__).splitlines()
    code = textwrap.dedent("\n".join(line for line in lines if line.startswith("    ")))
    model = Track()
    names: dict[str, Any] = {"model": model, "MISA": misa_single_file.MISA}
    exec(code, names)
    (optimizer,) = names["optimizers"]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    assert set(params) == set(model.parameters())
    tokens = torch.arange(11)
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not any(map(torch.equal, model.parameters(), before))


def test_imports_nothing_but_torch() -> None:
    tree = ast.parse(Path(misa_single_file.__file__).read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(str(node.module).partition(".")[0])
    assert modules == {"math", "torch"}
