"""The defaults work out of the box: 2,000 steps of SISA on digits, mixed and sorted by label."""

from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F

from benchmarks.tasks import digits_mlp, load_digits_split
from benchmarks.uneven_parts import parts_by_name
from torchpisa import SISA
from torchpisa.data import RoundSampler

SEEDS, STEPS = 5, 2000


def accuracy(task, make, seed):
    """Test accuracy after STEPS batches at a constant learning rate."""
    torch.manual_seed(seed)
    model = task.model()
    opt = make(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        opt.zero_grad()
        task.loss(model, task.draw(generator)).backward()
        opt.step()
    return task.evaluate(model, "test")


def test_sisa_on_digits_beside_adamw():
    task = digits_mlp(Path(), torch.device("cpu"))
    adamw = max(
        mean(
            accuracy(task, lambda params, lr=lr: torch.optim.AdamW(params, lr=lr), seed)
            for seed in range(SEEDS)
        )
        for lr in (1e-3, 3e-3, 1e-2)
    )
    sisa = mean(accuracy(task, SISA, seed) for seed in range(SEEDS))
    assert sisa >= adamw - 0.5, (sisa, adamw)


@pytest.mark.parametrize("name", ["4 parts, sorted", "10 parts, one label each"])
def test_sisa_on_parts_that_share_no_label(name):
    task = digits_mlp(Path(), torch.device("cpu"))
    x, y = load_digits_split()["train"]
    parts = parts_by_name(y)[name]
    model = task.model()
    opt = SISA(model.parameters(), batches=len(parts), weights=parts.weights)
    for index in RoundSampler(parts, batch_size=32, rounds=STEPS // len(parts)):
        opt.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        opt.step()
    assert task.evaluate(model, "test") >= 94
