"""The defaults work out of the box: on digits, mixed and sorted by label."""

from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F

from benchmarks.tasks import digits_mlp, load_digits_split
from benchmarks.uneven_parts import parts_by_name
from torchpisa import MISA, SISA
from torchpisa.data import RoundSampler

SEEDS, STEPS = 2, 400
# What torch.optim.AdamW has by `accuracy` with its defaults, mean of these seeds; torch 2.13 on a
# CPU. A tenth of its default learning rate costs SISA 3 and MISA 10 more.
ADAMW = 96.6


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


@pytest.mark.parametrize(("make", "margin"), [(SISA, -0.5), (MISA, 1.0)])
def test_digits_beside_adamw(make, margin):
    task = digits_mlp(Path(), torch.device("cpu"))
    assert mean(accuracy(task, make, seed) for seed in range(SEEDS)) >= ADAMW + margin


@pytest.mark.parametrize("name", ["4 parts, sorted", "10 parts, one label each"])
def test_sisa_on_parts_that_share_no_label(name):
    task = digits_mlp(Path(), torch.device("cpu"))
    x, y = load_digits_split()["train"]
    parts = parts_by_name(y)[name]
    model = task.model()
    opt = SISA(model.parameters(), batches=len(parts), weights=parts.weights)
    for index in RoundSampler(parts, batch_size=32, rounds=2000 // len(parts)):
        opt.zero_grad()
        F.cross_entropy(model(x[index]), y[index]).backward()
        opt.step()
    assert task.evaluate(model, "test") >= 94
