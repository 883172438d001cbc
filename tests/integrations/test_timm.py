"""timm: optimizers by name, with the groups and schedules of timm."""

import pytest
import torch
from torch import nn

try:
    import timm.optim as timm_optim
except ImportError as error:  # timm itself, or the torchvision it needs
    pytest.skip(f"timm cannot be imported: {error}", allow_module_level=True)

from timm.scheduler import CosineLRScheduler

from torchpisa.integrations.timm import register


def test_registered_optimizers_train():
    for name in register():
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        optimizer = timm_optim.create_optimizer_v2(model, name, lr=1e-2, weight_decay=0.05)
        assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.05]
        scheduler = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-4)
        x = torch.randn(32, 4)
        losses = []
        for epoch in range(10):
            optimizer.zero_grad()
            loss = (model(x) - x[:, :3]).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + 1)
        assert losses[-1] < losses[0]
