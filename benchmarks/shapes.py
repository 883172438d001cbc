"""Shapes of the parameters of known models, which is all that a step of an optimizer needs."""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

__all__ = ["MODELS", "Shape", "parameters"]


class Shape(NamedTuple):
    """The shape of one parameter; a matrix is a hidden one, a kernel is a convolution's."""

    name: str
    size: tuple[int, ...]
    kind: Literal["embedding", "matrix", "kernel", "head", "vector"]


def parameters(shapes: list[Shape]) -> int:
    """Return the number of parameters."""
    return sum(prod(shape.size) for shape in shapes)


def gpt2(width: int, layers: int, vocabulary: int = 50257, positions: int = 1024) -> list[Shape]:
    """Return GPT-2's shapes, with the names of transformers and matrices as (out, in).

    Query, key and value are one matrix; the embedding is the output layer too and counts once.
    """
    shapes = [
        Shape("wte.weight", (vocabulary, width), "embedding"),
        Shape("wpe.weight", (positions, width), "embedding"),
    ]
    for layer in range(layers):
        shapes += _norm(f"h.{layer}.ln_1", width)
        shapes += _linear(f"h.{layer}.attn.c_attn", 3 * width, width)
        shapes += _linear(f"h.{layer}.attn.c_proj", width, width)
        shapes += _norm(f"h.{layer}.ln_2", width)
        shapes += _linear(f"h.{layer}.mlp.c_fc", 4 * width, width)
        shapes += _linear(f"h.{layer}.mlp.c_proj", width, 4 * width)
    return shapes + _norm("ln_f", width)


def resnet34() -> list[Shape]:
    """Return the shapes of ResNet-34 for ImageNet."""
    shapes = [Shape("conv1.weight", (64, 3, 7, 7), "kernel"), *_norm("bn1", 64)]
    channels = 64
    for stage, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            shapes.append(Shape(f"{name}.conv1.weight", (width, channels, 3, 3), "kernel"))
            shapes += _norm(f"{name}.bn1", width)
            shapes.append(Shape(f"{name}.conv2.weight", (width, width, 3, 3), "kernel"))
            shapes += _norm(f"{name}.bn2", width)
            if channels != width:
                size = (width, channels, 1, 1)
                shapes.append(Shape(f"{name}.downsample.0.weight", size, "kernel"))
                shapes += _norm(f"{name}.downsample.1", width)
            channels = width
    return shapes + _linear("fc", 1000, 512, "head")


def lstm() -> list[Shape]:
    """Return the shapes of a three-layer LSTM for Penn Treebank.

    The paper takes the setup of AdaBelief, which is AWD-LSTM's: 10,000 words, an embedding of 400
    that is the output layer too, hidden layers of 1,150, 1,150 and 400. Four gates are one matrix.
    """
    words, embedding, hidden = 10_000, 400, 1150
    shapes = [Shape("encoder.weight", (words, embedding), "embedding")]
    sizes = [embedding, hidden, hidden, embedding]
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        for name, columns in (("ih", inputs), ("hh", outputs)):
            size = (4 * outputs, columns)
            shapes.append(Shape(f"rnns.{layer}.weight_{name}_l0", size, "matrix"))
        for name in ("ih", "hh"):
            shapes.append(Shape(f"rnns.{layer}.bias_{name}_l0", (4 * outputs,), "vector"))
    return [*shapes, Shape("decoder.bias", (words,), "vector")]


def _norm(name: str, width: int) -> list[Shape]:
    return [Shape(f"{name}.{which}", (width,), "vector") for which in ("weight", "bias")]


def _linear(
    name: str, rows: int, columns: int, kind: Literal["matrix", "head"] = "matrix"
) -> list[Shape]:
    weight = Shape(f"{name}.weight", (rows, columns), kind)
    return [weight, Shape(f"{name}.bias", (rows,), "vector")]


MODELS: dict[str, Callable[[], list[Shape]]] = {
    "gpt2-124m": lambda: gpt2(768, 12),
    "gpt2-355m": lambda: gpt2(1024, 24),
    "gpt2-1.5b": lambda: gpt2(1600, 48),
    "gpt2-50m": lambda: gpt2(480, 9),  # for CPUs
    "gpt2-1m": lambda: gpt2(128, 4, vocabulary=256, positions=128),  # bytes, on a laptop
    "resnet34": resnet34,
    "lstm": lstm,
    "small": lambda: [Shape(f"p.{i}", (1000,), "vector") for i in range(20)],  # Python's share
    "tiny": lambda: gpt2(16, 2, vocabulary=40, positions=8),  # for tests
}
