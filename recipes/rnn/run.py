"""One run: the model, the text, the optimizer, and perplexities as epochs go by."""

import itertools
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes import optimizers
from recipes.recipe import Line
from recipes.rnn import corpus
from recipes.rnn.config import Config, Settings
from recipes.rnn.model import LanguageModel
from recipes.training import Pass, drive, finite, reseed

__all__ = ["Training", "lacks", "ready", "run", "windows"]

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
    training = Training(settings, torch.device(device), data)
    file = None if checkpoints is None else Path(checkpoints) / f"{settings.name}.pt"
    return drive(training, settings, file, config.save_every)


def windows(length: int, bptt: int, parts: int, chance: random.Random) -> Iterator[list[slice]]:
    """Yield the windows of an epoch, each in as many parts that follow each other.

    Args:
        length: of the columns; the last word is a target only.
        bptt: words of a window on average; every twentieth window or so has half as many.
        parts: of a window. All but the last have the same length.
        chance: of the lengths.
    """
    start, end = 0, length - 1
    while end - start >= parts:
        middle = bptt if chance.random() < 0.95 else bptt / 2
        size = min(max(SHORTEST, parts, int(chance.gauss(middle, 5))), end - start)
        if end - start - size < parts:
            size = end - start
        share = size // parts
        edges = [start + share * part for part in range(parts)] + [start + size]
        yield [slice(a, b) for a, b in itertools.pairwise(edges)]
        start += size


class Training:
    """A language model in training.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
    """

    def __init__(self, settings: Settings, device: torch.device, data: str | None) -> None:
        self.settings, self.device, self.epochs, self.done = settings, device, settings.epochs, 0
        self.elapsed = 0.0
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            # Dropped weights are new in every pass, so there is nothing to keep compact.
            warnings.filterwarnings("ignore", "RNN module weights are not part of single")
        self.corpus_name = "ptb"
        if settings.fallback and missing(data):
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
        self.rounds = len(self.train) // settings.bptt
        self.optimizer = optimizers.build(settings.choice, self.model, self.rounds)
        self.hidden = self.model.start(settings.count)
        self._passes: dict[int, Pass] = {}  # by length
        self._loss = torch.zeros((), device=device)  # summed over the words of an epoch

    def loss(self, words: Tensor, targets: Tensor) -> Tensor:
        """The loss of a part of a window, with AR and TAR; moves the hidden states on."""
        plain, loss = self.model(words, targets, self.hidden)
        self._loss += plain.detach() * words.numel()
        return loss

    def step(self, part: slice) -> None:
        """A gradient of a part of a window, clipped, and the optimizer's step."""
        words = self.train[part]
        targets = self.train[part.start + 1 : part.stop + 1]
        own = self._passes.get(len(words))
        if own is None:
            changes = [*self.hidden, self._loss]
            first = next(iter(self._passes.values()), None)
            own = Pass(self.loss, self.model.parameters(), (words, targets), changes, like=first)
            self._passes[len(words)] = own
        own(words, targets)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()

    def epoch(self) -> Line:
        """Train for an epoch, validate, test, and return what to log."""
        settings = self.settings
        began = time.perf_counter()
        reseed(settings.seed, self.done)
        self.model.train()
        for state in self.hidden:
            state.zero_()
        chance = random.Random(f"{settings.seed} {self.done}")
        total = len(self.train) - 1
        for parts in windows(len(self.train), settings.bptt, settings.choice.batches, chance):
            start, size = parts[0].start, parts[-1].stop - parts[0].start
            moment = self.done + start / total
            rate = settings.schedule.factor(moment, settings.epochs)
            # A longer window has a gradient of more words.
            optimizers.set_rate(self.optimizer, rate * size / settings.bptt)
            for part in parts:
                self.step(part)
        self.done += 1
        loss = self._loss.item() / (total * settings.count)
        self._loss.zero_()
        self.elapsed += time.perf_counter() - began
        valid, test = self.perplexity(self.valid), self.perplexity(self.test)
        return {
            "epoch": self.done,
            "perplexity": finite(safe_exp(loss)),
            "valid_perplexity": finite(valid),
            "test_perplexity": finite(test),
            "elapsed": round(self.elapsed, 3),
            "state_bytes": optimizers.state_bytes(self.optimizer),
            "fallback": self.corpus_name != "ptb",
            "diverged": finite(loss) is None or finite(valid) is None,
        }

    @torch.no_grad()
    def perplexity(self, text: Tensor) -> float:
        """Perplexity of a text, given in columns."""
        self.model.eval()
        hidden = self.model.start(text.shape[1])
        total = torch.zeros((), device=self.device)
        for start in range(0, len(text) - 1, self.settings.bptt):
            stop = min(start + self.settings.bptt, len(text) - 1)
            plain, _ = self.model(text[start:stop], text[start + 1 : stop + 1], hidden)
            total += plain * (stop - start)
        return safe_exp(total.item() / (len(text) - 1))

    def state(self) -> dict[str, Any]:
        """All that it takes to go on, between epochs."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {"done": self.done, "elapsed": self.elapsed, **parts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.elapsed = state["done"], state["elapsed"]


def safe_exp(loss: float) -> float:
    """The perplexity of a loss, infinite instead of an error."""
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def missing(folder: str | None) -> bool:
    try:
        corpus.locate(folder)
    except FileNotFoundError:
        return True
    return False


def ready(settings: Sequence[Settings], *, data: str | None = None, **options: Any) -> None:
    """Raise FileNotFoundError if the text is missing, CorruptFileError if it is damaged."""
    if any(not each.fallback for each in settings):
        corpus.verify(data)


def lacks(settings: Settings) -> str | None:
    """Why this machine cannot do a run, or None."""
    return optimizers.lacks(settings.choice.name)
