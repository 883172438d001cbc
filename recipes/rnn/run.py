"""One run: the model, the text, the optimizer, and perplexities by epoch."""

import itertools
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from recipes import optimizers
from recipes.datasets import data_folder
from recipes.execution import print_line
from recipes.recipe import Line
from recipes.rnn import corpus
from recipes.rnn.config import Config, Settings
from recipes.rnn.model import LanguageModel
from recipes.training import GraphedPass, Training, finite_or_none, run_training, seed_from

__all__ = ["RnnTraining", "missing_requirement", "require_data", "run", "windows"]

SHORTEST = 5  # words of a window
TEST_COUNT = 10  # sequences side by side


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    checkpoints: str | None = None,
) -> Iterator[Line]:
    """Yield perplexities after every epoch; a run whose loss is not finite ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: where.
        data: the data folder.
        checkpoints: folder to save in and to resume from; None for neither.
    """
    training = RnnTraining(settings, torch.device(device), data)
    return run_training(training, checkpoints, config.save_every)


def windows(length: int, bptt: int, parts: int, source: random.Random) -> Iterator[list[slice]]:
    """Yield the windows of an epoch, each in `parts` consecutive parts.

    Args:
        length: of the columns; the last word is a target only.
        bptt: words of a window on average; about every twentieth window has half as many.
        parts: parts of a window. All but the last have the same length.
        source: of the random lengths.
    """
    start, end = 0, length - 1
    while end - start >= parts:
        middle = bptt if source.random() < 0.95 else bptt / 2
        size = min(max(SHORTEST, parts, int(source.gauss(middle, 5))), end - start)
        if end - start - size < parts:
            size = end - start
        share = size // parts
        edges = [start + share * part for part in range(parts)] + [start + size]
        yield [slice(a, b) for a, b in itertools.pairwise(edges)]
        start += size


class RnnTraining(Training):
    """A language model in training.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
    """

    def __init__(self, settings: Settings, device: torch.device, data: str | None) -> None:
        super().__init__(settings, device, settings.epochs)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            # Weights with dropout are new tensors in every pass and cannot be kept compact.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single")
        self.corpus_name = "ptb"
        if settings.fallback and corpus.is_missing(data):
            self.corpus_name = "python"
        text = corpus.load(self.corpus_name, data, settings.limit)
        self.train = corpus.columns(text.train, settings.count).to(device)
        self.valid, self.test = (
            corpus.columns(part, TEST_COUNT).to(device) for part in (text.valid, text.test)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2 * settings.seed + 1)
            self.model = LanguageModel(text.words, settings.layers, settings.sizes)
        self.model.to(device)
        for layer in self.model.layers:
            layer.weight_hh_l0.requires_grad_(settings.train_recurrent)
        self.rounds = len(self.train) // settings.bptt
        self.optimizer = optimizers.build(settings.choice, self.model, self.rounds)
        self.hidden = self.model.start(settings.count)
        self._passes: dict[int, GraphedPass] = {}  # by length
        self._loss = torch.zeros((), device=device)  # summed over the words of an epoch

    def loss(self, words: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a part of a window, with AR and TAR; advance the hidden states."""
        plain, loss = self.model(words, targets, self.hidden)
        self._loss += plain.detach() * words.numel()
        return loss

    def step(self, part: slice) -> None:
        """Step with the clipped gradient of a part of a window."""
        words = self.train[part]
        targets = self.train[part.start + 1 : part.stop + 1]
        if len(words) not in self._passes:
            self._passes[len(words)] = GraphedPass(
                self.loss,
                [param for param in self.model.parameters() if param.requires_grad],
                (words, targets),
                changes=[*self.hidden, self._loss],
                shares_memory_with=next(iter(self._passes.values()), None),
            )
        self._passes[len(words)](words, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()

    def advance(self) -> Line:
        """Train for an epoch, validate, test, and return what to log."""
        settings = self.settings
        began = time.perf_counter()
        seed_from(settings.seed, self.done)
        self.model.train()
        for state in self.hidden:
            state.zero_()
        source = random.Random(f"{settings.seed} {self.done}")
        total = len(self.train) - 1
        for parts in windows(len(self.train), settings.bptt, settings.choice.batches, source):
            start, size = parts[0].start, parts[-1].stop - parts[0].start
            moment = self.done + start / total
            rate = settings.schedule.factor(moment, settings.epochs)
            # In proportion to the window, whose gradient averages over more or fewer words.
            optimizers.scale_learning_rates(self.optimizer, rate * size / settings.bptt)
            for part in parts:
                self.step(part)
        self.done += 1
        loss = self._loss.item() / (total * settings.count)
        self._loss.zero_()
        self.elapsed += time.perf_counter() - began
        valid, test = self.perplexity(self.valid), self.perplexity(self.test)
        return {
            "epoch": self.done,
            "perplexity": finite_or_none(safe_exp(loss)),
            "valid_perplexity": finite_or_none(valid),
            "test_perplexity": finite_or_none(test),
            "elapsed": round(self.elapsed, 3),
            "state_bytes": optimizers.state_bytes(self.optimizer),
            "fallback": self.corpus_name != "ptb",
            "diverged": finite_or_none(loss) is None or finite_or_none(valid) is None,
        }

    @torch.no_grad()
    def perplexity(self, text: Tensor) -> float:
        """Return the perplexity of a text, given in columns."""
        self.model.eval()
        hidden = self.model.start(text.shape[1])
        total = torch.zeros((), device=self.device)
        for start in range(0, len(text) - 1, self.settings.bptt):
            stop = min(start + self.settings.bptt, len(text) - 1)
            plain, _ = self.model(text[start:stop], text[start + 1 : stop + 1], hidden)
            total += plain * (stop - start)
        return safe_exp(total.item() / (len(text) - 1))


def safe_exp(loss: float) -> float:
    """Return the perplexity of a loss: infinite instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def require_data(settings: Sequence[Settings], *, data: str | None = None, **options: Any) -> None:
    """Raise FileNotFoundError if the text is missing, CorruptFileError if it is damaged."""
    for fallback in {run.fallback for run in settings}:
        if fallback and corpus.is_missing(data):
            place = (data_folder(data) / "ptb").resolve()
            print_line(f"Penn Treebank is not in {place}: Python's documentation takes its place")
        else:
            corpus.verify(data)


def missing_requirement(settings: Settings) -> str | None:
    """Return why this machine cannot do a run, or None."""
    return optimizers.missing_requirement(settings.choice.name)
