"""Generator and critic: the small convolutional networks of the AdaBelief experiments."""

import torch
from torch import Tensor, nn

__all__ = ["NOISE", "build"]

NOISE = 100  # numbers that a picture is made from


def generator(pixels: int, width: int) -> nn.Module:
    """Build transposed convolutions from 1 x 1 to a square of a power of 2, in [-1, 1]."""
    channels = width * pixels // 8
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, channels, 4, 1, 0, bias=False)]
    size = 4
    while size < pixels:
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        size *= 2
        outputs = 3 if size == pixels else channels // 2
        layers.append(nn.ConvTranspose2d(channels, outputs, 4, 2, 1, bias=False))
        channels = outputs
    return nn.Sequential(*layers, nn.Tanh())


class Critic(nn.Module):
    """Strided convolutions down to 4 x 4, then one number per picture.

    Args:
        pixels: of a side.
        width: channels of the first layer; they double with every layer.
        squash: whether that number is a convolution through a sigmoid, as the WGAN of these
            experiments has it, or a linear layer, as their WGAN-GP.
    """

    def __init__(self, pixels: int, width: int, squash: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False)]
        size, channels = pixels // 2, width
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        while size > 4:
            layers.append(nn.Conv2d(channels, 2 * channels, 4, 2, 1, bias=False))
            size, channels = size // 2, 2 * channels
            layers += [nn.BatchNorm2d(channels), nn.LeakyReLU(0.2, inplace=True)]
        if squash:
            layers += [nn.Conv2d(channels, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0)]
        else:
            layers += [nn.Flatten(), nn.Linear(16 * channels, 1), nn.Flatten(0)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build(pixels: int, width: int, squash: bool, seed: int) -> tuple[nn.Module, nn.Module]:
    """Build generator and critic with weights that the seed gives, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        models = generator(pixels, width), Critic(pixels, width, squash)
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                    nn.init.normal_(module.weight, 0.0, 0.02)
                elif isinstance(module, nn.BatchNorm2d):
                    nn.init.normal_(module.weight, 1.0, 0.02)
                    nn.init.zeros_(module.bias)
        return models
