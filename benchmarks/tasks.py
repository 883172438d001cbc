"""Small tasks of different kinds: an MLP, a CNN, a transformer and logistic regression.

A task has training data on the device, a model, a loss and a metric. Folders with the original
files of MNIST, Penn Treebank and Adult are given by the caller; digits come with scikit-learn.
"""

import gzip
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import datasets

__all__ = ["STEPS", "TASKS", "Task", "fit", "load_digits_split"]


@dataclass
class Task:
    """A model to train on batches of a fixed size.

    Attributes:
        model: makes a fresh model.
        draw: draws a training batch, with a generator on the device.
        loss: loss of a model on a batch.
        evaluate: metric of a model on "validation" or "test".
        metric: name of the metric.
        better: 1 if more of it is better, -1 if less.
    """

    model: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    evaluate: Callable[[nn.Module, str], float]
    metric: str
    better: int


def _classification(
    model: Callable[[], nn.Module], splits: dict[str, tuple[Tensor, Tensor]], batch_size: int
) -> Task:
    x, y = splits["train"]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(x), (batch_size,), generator=generator, device=x.device)
        return x[index], y[index]

    @torch.no_grad()
    def evaluate(model: nn.Module, split: str) -> float:
        x, y = splits[split]
        hits = sum(
            (model(a).argmax(1) == b).sum()
            for a, b in zip(x.split(5000), y.split(5000), strict=True)
        )
        return 100 * float(hits) / len(y)

    return Task(
        model, draw, lambda m, b: F.cross_entropy(m(b[0]), b[1]), evaluate, "accuracy (%)", 1
    )


def load_digits_split() -> dict[str, tuple[Tensor, Tensor]]:
    """Return scikit-learn's digits, shuffled once: 1,000 to train, 297 to validate, 500 to test."""
    images, labels = datasets.digits()
    x, y = torch.tensor(images, dtype=torch.float32).flatten(1) / 16, torch.tensor(labels).long()
    cuts = {"train": slice(0, 1000), "validation": slice(1000, 1297), "test": slice(1297, None)}
    return {name: (x[cut], y[cut]) for name, cut in cuts.items()}


def digits_mlp(data: Path, device: torch.device) -> Task:
    """MLP 64-128-128-10 on scikit-learn's digits."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        ).to(device)

    splits = {name: (x.to(device), y.to(device)) for name, (x, y) in load_digits_split().items()}
    return _classification(model, splits, 64)


def mnist_cnn(data: Path, device: torch.device) -> Task:
    """Two convolutions and two linear layers on MNIST; the last 5,000 training images validate."""

    train, labels, test, test_labels = datasets.read("mnist", data)

    def split(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        x, y = datasets.scaled("mnist", images), torch.tensor(labels).long()
        return x.to(device), y.to(device)

    splits = {
        "train": split(train[:-5000], labels[:-5000]),
        "validation": split(train[-5000:], labels[-5000:]),
        "test": split(test, test_labels),
    }

    def model() -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, 10)),
        ).to(device)

    return _classification(model, splits, 128)


class CharTransformer(nn.Module):
    """Pre-norm causal layers over characters."""

    def __init__(
        self, characters: int, context: int, width: int = 128, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        hidden = self.token(x) + self.position[: x.shape[1]]
        return self.head(self.layers(hidden, mask=mask, is_causal=True))


def ptb_transformer(data: Path, device: torch.device) -> Task:
    """Two-layer transformer on the characters of Penn Treebank, contexts of 64, batches of 32."""
    context, batch_size = 64, 32
    names = {"train": "train", "validation": "valid", "test": "test"}
    texts = {}
    for split, name in names.items():
        with gzip.open(data / "ptb" / f"ptb.{name}.txt.gz", "rt") as file:
            texts[split] = file.read()
    characters = sorted(set("".join(texts.values())))
    number = {c: i for i, c in enumerate(characters)}
    codes = {k: torch.tensor([number[c] for c in text]).to(device) for k, text in texts.items()}
    offsets = torch.arange(context + 1, device=device)

    def windows(split: str, starts: Tensor) -> tuple[Tensor, Tensor]:
        block = codes[split][starts[:, None] + offsets]
        return block[:, :-1], block[:, 1:]

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        last = len(codes["train"]) - context - 1
        return windows(
            "train", torch.randint(last, (batch_size,), generator=generator, device=device)
        )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    @torch.no_grad()
    def evaluate(model: nn.Module, split: str) -> float:
        starts = torch.arange(0, len(codes[split]) - context - 1, context, device=device)[:2048]
        losses = [loss(model, windows(split, part)) * len(part) for part in starts.split(256)]
        return float(sum(losses)) / len(starts) / math.log(2)

    def model() -> nn.Module:
        return CharTransformer(len(characters), context).to(device)

    return Task(model, draw, loss, evaluate, "bits per character", -1)


def adult_logistic(data: Path, device: torch.device) -> Task:
    """Logistic regression on UCI Adult (a9a); the last 5,000 training rows validate."""

    arrays = datasets.read("adult", data)
    train, test = (
        (datasets.scaled("adult", x).to(device), torch.tensor(y).long().to(device))
        for x, y in (arrays[:2], arrays[2:])
    )
    x, y = train
    splits = {"train": (x[:-5000], y[:-5000]), "validation": (x[-5000:], y[-5000:]), "test": test}
    return _classification(lambda: nn.Linear(123, 2).to(device), splits, 128)


TASKS = {
    "mlp": digits_mlp,
    "cnn": mnist_cnn,
    "transformer": ptb_transformer,
    "logistic": adult_logistic,
}

STEPS = {"mlp": 2000, "cnn": 2000, "transformer": 3000, "logistic": 2000}
EVALUATIONS = 20
# Makes an optimizer from a model, its task and the loss of a model on a batch.
Maker = Callable[[nn.Module, Task, Callable[[nn.Module, Any], Tensor]], torch.optim.Optimizer]


def fit(
    task_name: str, data: str, device: str, seed: int, scale: float, make: Maker
) -> dict[str, Any]:
    """Train once with a linear decay of lr over the last fifth; return the curves.

    Args:
        task_name: one of `TASKS`.
        data: folder of the data sets.
        device: the device to train on.
        seed: seed of initial weights and order of the data.
        scale: a factor on the loss.
        make: makes the optimizer, from the model, the task and the scaled loss.
    """
    torch.set_num_threads(1)
    task = TASKS[task_name](Path(data), torch.device(device))
    torch.manual_seed(seed)
    model = task.model()
    generator = torch.Generator(device).manual_seed(seed)

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return scale * task.loss(model, batch)

    opt = make(model, task, loss_of)
    steps, tail = STEPS[task_name], STEPS[task_name] // 5
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (steps - k) / tail))
    curve, losses, start = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        for _ in range(getattr(opt, "batches", 1)):
            opt.zero_grad()
            loss = loss_of(model, task.draw(generator))
            loss.backward()
            try:
                opt.step()
            except FloatingPointError:  # diverged: nothing was changed, so the metric is still one
                opt.zero_grad()
        schedule.step()
        losses.append(loss.detach() / scale)
        if step % (steps // EVALUATIONS) == 0:
            recent = torch.stack(losses[-(steps // EVALUATIONS) :]).mean()
            curve.append((step, float(recent), task.evaluate(model, "validation")))
    return {
        "task": task_name,
        "seed": seed,
        "metric": task.metric,
        "better": task.better,
        "curve": curve,
        "validation": curve[-1][2],
        "test": task.evaluate(model, "test"),
        "seconds": round(time.perf_counter() - start, 2),
    }
