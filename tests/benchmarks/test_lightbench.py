"""LightBench through our runner, on a package that looks like it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import lightbench

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon yet")

UTILS = """
import torch
import optuna
from heavyball.helpers import AutoSampler

def trial(*arguments, **options):
    raise AssertionError("its search needs a GPU")

def _resolve_dtype(value):
    return getattr(torch, value[0] if isinstance(value, list) else value)

def param_norm_win_condition(target, offset):
    target = torch.full((), target, device="cuda")
    def win(model, loss):
        return (model.param.add(offset).norm() < target).item(), {}
    return win
"""
PROBLEM = """
import torch
from torch import nn
from lightbench.utils import param_norm_win_condition, trial

configs = {
    "trivial": {"start": 0.02},
    "medium": {"start": 3.0},
    "hard": {"start": 1e6},
    "nightmare": {"start": 1e9},
}

class Model(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.param = nn.Parameter(torch.full((3,), start, device="cuda"))

    def forward(self):
        return self.param.square().sum()

def main(dtype: str = "float32", steps: int = 1, opt: str = "", config: str = "trivial"):
    assert config != "nightmare", "loaded after a failure"
    model = Model(**configs[config]).cuda().double()
    trial(model, None, None, param_norm_win_condition(0.01, 0), steps, opt=opt, dtype=dtype)
"""
RUNNER = """
benchmarks = [
    "memory_constrained.py",
    "problem.py",
]
"""


def take_away() -> dict[str, ModuleType]:
    packages = ("lightbench", "heavyball", "optuna")
    names = [name for name in sys.modules if name.split(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for folder, files in {
        "lightbench": {
            **{"__init__.py": "", "utils.py": UTILS, "problem.py": PROBLEM},
            "run_all_benchmarks.py": RUNNER,
        },
        "heavyball": {"__init__.py": ""},
    }.items():
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = take_away()
    yield
    take_away()
    sys.modules.update(before)


@pytest.mark.usefixtures("package")
def test_difficulties_up_to_the_first_failure() -> None:
    assert lightbench.benchmarks() == ["problem"]
    problem = lightbench.load("problem", "medium", 0)
    assert problem.model.param.dtype == torch.float32
    assert problem.model.param.device.type == "cpu"
    assert lightbench.solve(problem, "adamw-0.001", 1.0, 20, 0) is None
    step = lightbench.solve(problem, "adamw-0.001", 1000.0, 300, 0)
    assert step is not None
    assert torch.equal(problem.model.param, torch.full((3,), 3.0))
    line = lightbench.climb(("problem", "adamw-0.001", 0), 60)
    solved, medium, *harder = line["tries"]
    # 0.02 is within reach of steps of 1e-3, 3.0 of steps of 0.1.
    assert (solved["difficulty"], solved["factor"]) == ("trivial", 1.0)
    assert (medium["difficulty"], medium["factor"]) == ("medium", 100.0)
    assert [one["difficulty"] for one in harder] == ["hard", "nightmare"]
    assert all(one == {**one, "factor": None, "step": None} for one in harder)
    assert "error" not in harder[1]
    assert lightbench.rates([line, line]) == {"adamw-0.001": (4, 2, 8)}


def test_page_has_published_rates_below(tmp_path: Path) -> None:
    tries = [
        {"difficulty": "trivial", "factor": 1.0, "step": 7},
        {"difficulty": "easy", "factor": 10.0, "step": 8},
        {"difficulty": "hard", "factor": None, "step": None},
    ]
    line = {"benchmark": "beale", "optimizer": "misa", "seed": 0, "steps": 500, "tries": tries}
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**line, "tries": []}) + "\n" + json.dumps(line) + "\n")
    lightbench.main(["report", "--runs", str(path), "--results", str(tmp_path)])
    page = (tmp_path / "lightbench.md").read_text().splitlines()
    assert page[2] == "| misa | 2 of 3 (67 %) | 1 of 3 (33 %) |"
    published = [row.split("(")[-1].split(")")[0] for row in page[3:7]]
    assert published == ["72 %", "73 %", "51 %", "77 %"]
    assert json.loads((tmp_path / "lightbench.json").read_text()) == [line]
