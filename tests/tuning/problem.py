"""A small regression with mini-batches, on any scale of the loss."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 2)
    )


def loader(generator: torch.Generator | None = None) -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(320, 5, generator=drawn)
    y = x[:, :2] * x[:, 2:4] + 0.1 * torch.randn(320, 2, generator=drawn)
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=generator)


def scaled(scale: float = 1.0) -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return scale * nn.functional.mse_loss(model(batch[0]), batch[1])

    return loss
