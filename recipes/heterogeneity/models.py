"""The models of the published federated scripts."""

import torch
from torch import nn

__all__ = ["build", "lenet", "mlp"]


def lenet(channels: int, size: int, classes: int = 10) -> nn.Sequential:
    """LeNet-like: 6 and 16 filters of 5x5 without padding, then 120 and 84 units.

    Args:
        channels: of the images.
        size: their height and width, 28 or 32.
        classes: outputs.
    """
    left = ((size - 4) // 2 - 4) // 2  # what two convolutions and two poolings leave of it
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * left * left, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def mlp(features: int, classes: int, hidden: tuple[int, ...] = (32, 16, 8)) -> nn.Sequential:
    """Linear layers with ReLU in between; the hidden ones are the published script's for Adult."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


def build(dataset: str, shape: torch.Size, classes: int, seed: int) -> nn.Module:
    """The model for a data set with inputs of this shape, its first weights by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if dataset == "digits":  # not the paper's, so anything that learns quickly
            return mlp(shape[0], classes, hidden=(128,))
        return mlp(shape[0], classes) if len(shape) == 1 else lenet(shape[0], shape[-1], classes)
