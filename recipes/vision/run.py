"""One run: the model, the images, the optimizer, and loss and accuracy by epoch."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recipes import datasets, optimizers
from recipes.recipe import Line
from recipes.training import (
    GraphedPass,
    GraphedRound,
    Training,
    finite_or_none,
    forward_precision,
    run_training,
    seed_from,
)
from recipes.vision import data as images
from recipes.vision import imagenet
from recipes.vision.config import Config, Settings
from recipes.vision.models import build

__all__ = ["VisionTraining", "missing_requirement", "require_data", "run"]

TEST_BATCH = 1000
ROUNDS_BEFORE_GRAPH = 3  # in which the optimizer makes its state and compiles its kernels


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    compile: bool = False,
    checkpoints: str | None = None,
) -> Iterator[Line]:
    """Yield loss and accuracy after every epoch; a run whose loss is not finite ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: where.
        data: the data folder.
        compile: whether torch.compile compiles the model.
        checkpoints: folder to save in and to resume from; None for neither.
    """
    training = VisionTraining(settings, torch.device(device), data, compile)
    return run_training(training, checkpoints, config.save_every)


class VisionTraining(Training):
    """A model in training.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
        compile: whether to compile the model.
    """

    def __init__(
        self, settings: Settings, device: torch.device, data: str | None, compile: bool = False
    ) -> None:
        super().__init__(settings, device, settings.epochs)
        if device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.data = load_images(settings, data, device)
        self.rounds = self.data.count // settings.batch
        if not self.rounds:
            raise ValueError(
                f"batch must be at most the number of training images, {self.data.count}, "
                f"got {settings.batch}"
            )
        seed = 2 * settings.seed + 1
        self.model = build(
            *(settings.dataset, settings.model, self.data.classes, settings.width, seed)
        ).to(device)
        self.forward = torch.compile(self.model) if compile else self.model
        choice = settings.choice
        self.graphs_rounds = device.type == "cuda" and choice.name in optimizers.CONSENSUS
        self.gamma = optimizers.gamma_rule(choice, self.rounds) if self.graphs_rounds else None
        if self.graphs_rounds:
            choice = optimizers.capturable(choice)
        self.optimizer = optimizers.build(choice, self.model, self.rounds)
        self._pass: GraphedPass | None = None
        self._round: GraphedRound | None = None
        self._rounds_without_graph = 0
        self._sums = torch.zeros(2, device=device)  # losses and right answers of an epoch

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch; add it and the right answers to the epoch's sums."""
        with forward_precision(self.settings.precision, self.device):
            outputs = self.forward(self.data.normalise(inputs))
        outputs = outputs.float()
        loss = F.cross_entropy(outputs, targets)
        right = (outputs.detach().argmax(1) == targets).sum()
        self._sums += torch.stack([loss.detach() * len(targets), right])
        return loss

    def advance(self) -> Line:
        """Train for an epoch, test, and return what to log."""
        settings = self.settings
        start = time.perf_counter()
        seed_from(settings.seed, self.done)
        self.model.train()
        order = settings.batch, settings.batch, settings.seed, self.done
        for number, (inputs, targets) in enumerate(self.data.batches(*order)):
            rate = settings.schedule.factor(self.done + number / self.rounds, settings.epochs)
            optimizers.scale_learning_rates(self.optimizer, rate)
            if self.gamma is not None:
                gamma = self.gamma(self.done * self.rounds + number)
                if gamma != 1:
                    optimizers.grow_sigmas(self.optimizer, gamma)
            self.train_round(inputs, targets)
        self.done += 1
        loss, right = (self._sums / (self.rounds * settings.batch)).tolist()
        self._sums.zero_()
        self.elapsed += time.perf_counter() - start
        test_loss, accuracy = self.test()
        return {
            "epoch": self.done,
            "loss": finite_or_none(loss),
            "accuracy": right,
            "test_loss": finite_or_none(test_loss),
            "test_accuracy": accuracy,
            "elapsed": round(self.elapsed, 3),
            "state_bytes": optimizers.state_bytes(self.optimizer),
            "fallback": self.data.name != settings.dataset,
            "diverged": finite_or_none(loss) is None,
        }

    def train_round(self, inputs: Tensor, targets: Tensor) -> None:
        """Train on a batch: in parts for an optimizer with several, on a GPU as one graph."""
        parts = self.settings.choice.batches
        if self._pass is not None and self._round is None and self.graphs_rounds:
            if self._pass.graph is None:
                self.graphs_rounds = False
            elif self._rounds_without_graph >= ROUNDS_BEFORE_GRAPH:
                self._round = GraphedRound(self._pass, self.optimizer, (inputs, targets), parts)
        if self._round is not None:
            self._round(inputs, targets)
            return
        for share in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            if self._pass is None:
                changes = [*self.model.buffers(), self._sums]
                self._pass = GraphedPass(self.loss, self.model.parameters(), share, changes)
            self._pass(*share)
            self.optimizer.step()
        self._rounds_without_graph += 1

    @torch.no_grad()
    def test(self) -> tuple[float, float]:
        """Return loss and accuracy on the test images."""
        self.model.eval()
        sums = torch.zeros(2, device=self.device)
        count = 0
        for inputs, targets in self.data.tests(TEST_BATCH):
            with forward_precision(self.settings.precision, self.device):
                outputs = self.model(self.data.normalise(inputs))
            outputs = outputs.float()
            right = (outputs.argmax(1) == targets).sum()
            sums += torch.stack([F.cross_entropy(outputs, targets, reduction="sum"), right])
            count += len(targets)
        loss, accuracy = (sums / count).tolist()
        return loss, accuracy


def load_images(settings: Settings, folder: str | None, device: torch.device) -> Any:
    """Return the images of a run."""
    if settings.dataset == "imagenet":
        return imagenet.load(folder, str(device), settings.limit)
    name = settings.dataset
    if settings.fallback and datasets.is_missing(name, folder):
        name = "digits"
    return images.load(name, folder, str(device), settings.limit)


def require_data(settings: Sequence[Settings], *, data: str | None = None, **options: Any) -> None:
    """Raise FileNotFoundError if images are missing, CorruptFileError if they are damaged."""
    for name, fallback in dict.fromkeys((run.dataset, run.fallback) for run in settings):
        if name == "imagenet":
            imagenet.locate(data)
        else:
            images.require(name, data, fallback)


def missing_requirement(settings: Settings) -> str | None:
    """Return why this machine cannot do a run, or None."""
    return optimizers.missing_requirement(settings.choice.name)
