"""The models: those of the AdaBelief experiments for CIFAR-10, and four for ImageNet."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "build"]


def conv(
    inputs: int, outputs: int, size: int, stride: int = 1, padding: int | None = None
) -> nn.Conv2d:
    """Build a convolution without bias, to precede a normalisation; padded to keep the size."""
    pad = size // 2 if padding is None else padding
    return nn.Conv2d(inputs, outputs, size, stride, pad, bias=False)


# VGG, without batch normalisation


def vgg11(classes: int, width: float = 1.0) -> nn.Module:
    """Build VGG-11 for 32 x 32 pixels: no batch normalisation, dropout in the classifier."""
    plan: list[int | None] = [64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None]
    layers: list[nn.Module] = []
    channels = 3
    for outputs in plan:
        if outputs is None:
            layers.append(nn.MaxPool2d(2))
            continue
        outputs = round(outputs * width)
        layer = nn.Conv2d(channels, outputs, 3, padding=1)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / (9 * outputs)))
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU(inplace=True)]
        channels = outputs
    layers.append(nn.Flatten())
    for _ in range(2):
        layers += [nn.Dropout(), nn.Linear(channels, channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(channels, classes))


# ResNet


class Basic(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x), inplace=True)


def resnet(blocks: Sequence[int], classes: int, width: float, small: bool) -> nn.Module:
    """Build a ResNet of basic blocks; `small` is for 32 x 32 pixels, without the strided start."""
    channels = round(64 * width)
    start = [conv(3, channels, 3 if small else 7, 1 if small else 2), nn.BatchNorm2d(channels)]
    layers: list[nn.Module] = [*start, nn.ReLU(inplace=True)]
    if not small:
        layers.append(nn.MaxPool2d(3, 2, 1))
    for stage, count in enumerate(blocks):
        outputs = round(64 * 2**stage * width)
        for block in range(count):
            layers.append(Basic(channels, outputs, 2 if stage and not block else 1))
            channels = outputs
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


def resnet18_imagenet(classes: int, width: float = 1.0) -> nn.Module:
    """Build ResNet-18 for ImageNet, with He's initialisation."""
    model = resnet([2, 2, 2, 2], classes, width, small=False)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# DenseNet


class Dense(nn.Module):
    """A 1 x 1 and a 3 x 3 convolution, whose result is concatenated with the input."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), conv(inputs, 4 * growth, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), conv(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([self.conv2(F.relu(self.norm2(y))), x], 1)


def densenet121(classes: int, width: float = 1.0, small: bool = True) -> nn.Module:
    """Build DenseNet-121; `small` is for 32 x 32 pixels, without the strided start."""
    growth = max(2, round(32 * width))
    channels = 2 * growth
    layers: list[nn.Module] = [conv(3, channels, 3)]
    if not small:
        layers = [conv(3, channels, 7, 2), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(3, 2, 1))
    counts = (6, 12, 24, 16)
    for stage, count in enumerate(counts):
        for _ in range(count):
            layers.append(Dense(channels, growth))
            channels += growth
        if stage < len(counts) - 1:
            norm = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
            layers += [*norm, conv(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes))


# AlexNet and ViT


def alexnet(classes: int, width: float = 1.0) -> nn.Module:
    """Build AlexNet with one tower, for ImageNet."""
    a, b, c, d = (round(n * width) for n in (64, 192, 384, 256))
    hidden = round(4096 * width)
    return nn.Sequential(
        *(nn.Conv2d(3, a, 11, 4, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(a, b, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(c, d, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(d, d, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)),
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *(nn.Dropout(), nn.Linear(36 * d, hidden), nn.ReLU(inplace=True)),
        *(nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
        nn.Linear(hidden, classes),
    )


class VisionTransformer(nn.Module):
    """ViT-B/16 for 224 pixels: 12 layers, 12 heads; `width` scales its 768 channels."""

    def __init__(
        self, classes: int, width: float = 1.0, pixels: int = 224, layers: int = 12
    ) -> None:
        super().__init__()
        heads = 12
        size = heads * max(1, round(64 * width))
        self.patches = nn.Conv2d(3, size, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, size))
        self.positions = nn.Parameter(torch.randn(1, (pixels // 16) ** 2 + 1, size) * 0.02)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, **options)
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(size), enable_nested_tensor=False
        )
        for param in self.layers.parameters():
            if param.dim() > 1:  # the layers are copies of one: draw each anew
                nn.init.xavier_uniform_(param)
        self.head = nn.Linear(size, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.layers(tokens)[:, 0])


MODELS: dict[tuple[str, str], Callable[..., nn.Module]] = {
    ("cifar10", "vgg11"): vgg11,
    ("cifar10", "resnet34"): lambda classes, width: resnet([3, 4, 6, 3], classes, width, True),
    ("cifar10", "densenet121"): densenet121,
    ("imagenet", "resnet18"): resnet18_imagenet,
    ("imagenet", "vit_b_16"): VisionTransformer,
    ("imagenet", "alexnet"): alexnet,
    ("imagenet", "densenet121"): lambda classes, width: densenet121(classes, width, small=False),
}
"""By data set and name."""


def build(dataset: str, name: str, classes: int, width: float, seed: int) -> nn.Module:
    """Build a model with weights that the seed gives, on the CPU.

    Args:
        dataset: "cifar10" or "imagenet".
        name: of the model.
        classes: outputs.
        width: all channels times this.
        seed: of the weights.
    """
    if (dataset, name) not in MODELS:
        names = ", ".join(model for data, model in MODELS if data == dataset)
        raise ValueError(f"model must be one of {names} for {dataset}, got {name!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MODELS[dataset, name](classes, width)
