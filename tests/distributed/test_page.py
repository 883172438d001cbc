"""The blocks of `docs/distributed.md` that need several ranks, on several ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from tests.distributed.processes import run

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


class Net(nn.Module):
    """A model like those of readers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)


def read(folder: Path) -> dict[str, Any]:
    os.chdir(folder)
    distributed.init_process_group = lambda: None  # it has been
    rank = distributed.get_rank()
    x = torch.randn(24 + rank, 8, generator=torch.Generator().manual_seed(rank))
    dataset = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    names: dict[str, Any] = {
        "Net": Net,
        "device": torch.device("cpu"),
        "dataset": dataset,
        "loader": torch.utils.data.DataLoader(dataset, batch_size=8, drop_last=True),
        "loss_fn": nn.functional.cross_entropy,
        "steps": 200,
        "torch": torch,
    }
    for number, block in enumerate(PAGE.read_text().split("```python\n")[1:]):
        code = block.partition("```")[0]
        exec(compile(code, f"block {number} of {PAGE.name}", "exec"), names)
    steps = names["load"](names["latest"]("checkpoints"), names["model"], names["opt"])
    return {"steps": steps, "rounds": names["opt"].iteration}


def test_blocks_run(tmp_path: Path) -> None:
    assert run(read, 4, tmp_path) == [{"steps": {"step": 200}, "rounds": 1}] * 4
