"""The models of the published federated scripts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["build", "lenet", "mlp"]


class ConvolutionAndPooling(nn.Conv2d):
    """A 5x5 convolution, max-pooling by 2 and ReLU, for inputs of even size, channels last.

    One 3x3 convolution on blocks of 2x2 pixels gives the four outputs of every pooling window as
    channels. It is the same function of the same parameters, for GPUs, whose kernels for one or six
    channels are slow.
    """

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters, kernel_size=5)

    def forward(self, x: Tensor) -> Tensor:
        filters, channels = self.weight.shape[:2]
        places = [(i, j) for i in (0, 1) for j in (0, 1)]  # of an output in its window
        w = torch.stack([F.pad(self.weight, (j, 1 - j, i, 1 - i)) for i, j in places])
        w = w.reshape(4 * filters, channels, 3, 2, 3, 2).permute(0, 3, 5, 1, 2, 4)
        w = w.reshape(4 * filters, 4 * channels, 3, 3)
        x = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).transpose(2, 3).flatten(3)
        y = F.conv2d(x.permute(0, 3, 1, 2), w).permute(0, 2, 3, 1).unflatten(3, (4, filters))
        return F.relu(y.max(3).values + self.bias)


class ChannelsLast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)


def lenet(channels: int, size: int, classes: int = 10) -> nn.Sequential:
    """Build a LeNet-like network: 6 and 16 filters of 5x5 without padding, then 120 and 84 units.

    Args:
        channels: the channels of the images.
        size: their height and width, 28 or 32.
        classes: outputs.
    """
    remaining = ((size - 4) // 2 - 4) // 2  # what two convolutions and two poolings leave of it
    return nn.Sequential(
        ChannelsLast(),
        ConvolutionAndPooling(channels, 6),
        ConvolutionAndPooling(6, 16),
        ChannelsFirst(),
        *(nn.Flatten(), nn.Linear(16 * remaining * remaining, 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def mlp(features: int, classes: int, hidden: tuple[int, ...] = (32, 16, 8)) -> nn.Sequential:
    """Build linear layers with ReLU; the default sizes are the published script's for Adult."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(features, width), nn.ReLU()]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, classes))


def build(dataset: str, shape: torch.Size, classes: int, seed: int) -> nn.Module:
    """Build the model for a data set with inputs of this shape; the seed gives the weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if dataset == "digits":  # not the paper's, so anything that learns quickly
            return mlp(shape[0], classes, hidden=(128,))
        return mlp(shape[0], classes) if len(shape) == 1 else lenet(shape[0], shape[-1], classes)
