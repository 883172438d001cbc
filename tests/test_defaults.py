"""The defaults work out of the box: 2,000 steps of SISA on digits beside AdamW's best."""

from pathlib import Path
from statistics import mean

import torch

from benchmarks.tasks import digits_mlp
from torchpisa import SISA

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
