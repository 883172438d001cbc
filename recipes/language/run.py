"""One run: the model, the tokens, the optimizers, and the loss by step."""

import contextlib
import gc
import math
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recipes import ranks
from recipes.language import model as models
from recipes.language import optimizers, tokens
from recipes.language.config import Config, Settings
from recipes.language.model import GPT2, PlainGPT2, Sizes, sizes_of
from recipes.recipe import Line
from recipes.training import Training, finite_or_none, run_training

__all__ = ["LanguageTraining", "micro_batch", "missing_requirement", "require_data", "run"]

DIVERGED = 2.0  # times the loss of a guess
MEMORY_SHARE = 0.6  # of the free memory, for one forward and backward pass
CPU_MEMORY = 2**31  # bytes for one such pass on a CPU


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    compile: bool = False,
    checkpoints: str | None = None,
    save_weights: str | None = None,
) -> Iterator[Line]:
    """Yield losses, times and bytes of state every few steps; one that diverges ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: where.
        data: the data folder.
        compile: whether torch.compile compiles the model, once for all runs of a process, which
            then have to follow each other.
        checkpoints: folder to save in and to resume from; None for neither. The file of a run is
            removed when it is done.
        save_weights: folder to leave the weights of a finished run in, under its name; see
            `recipes.language.model.save_weights`. None for none.
    """
    training = LanguageTraining(settings, torch.device(device), data, compile)
    yield from run_training(training, checkpoints, config.save_every)
    if save_weights is not None and training.done == training.total and not ranks.rank():
        models.save_weights(training.model, save_weights, settings.name)


class LanguageTraining(Training):
    """A model in training, in one process or in several that torchrun has started.

    Several processes share the batches of a round: each has some of them, with their duals, if
    their number allows it, and else its part of the sequences of every batch.

    Args:
        settings: of the run.
        device: where.
        data: the data folder.
        compile: whether to compile the model.
    """

    saved = ("model", "team")

    def __init__(
        self, settings: Settings, device: torch.device, data: str | None, compile: bool = False
    ) -> None:
        super().__init__(settings, device, settings.steps)
        sizes = sizes_of(settings.model)
        train, validation = tokens.load(settings.tokens, data)
        share = settings.sequences // settings.batches
        shape = sizes.context, sizes.vocabulary
        self.data = tokens.Batches(train, settings.batches, share, *shape)
        self.parts, self.split = share_work(settings.batches, share)
        to_choose, to_report = tokens.held_out(validation, settings.validation, *shape)
        self.validation = torch.from_numpy(to_choose).to(device)
        self.test = torch.from_numpy(to_report).to(device)
        if compile:
            self.model = compiled_model(settings.model, str(device))
            self.model.load_state_dict(first_weights(settings.model, settings.seed))
            self.model.zero_grad()
        else:
            self.model = models.build_by_name(settings.model, settings.seed).to(device)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # these products are the optimizers' only
            gc.collect()  # what an earlier run has left would count
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        nodes = ranks.count() > 1 and not self.split
        self.team = optimizers.build(settings.choice, self.model, len(self.parts), nodes)
        self.micro = settings.micro or micro_batch(sizes, len(self.draw(0)), device)
        self.stopwatch = Stopwatch(device)
        self._since = time.perf_counter()
        self._logged = 0  # the step of the last line
        self._loss = torch.zeros((), device=device)  # summed up since then

    def first_line(self) -> Line:
        """Return the line before the first step."""
        return self.line(validate=True)

    def advance(self) -> Line:
        """Train for `log_every` steps, or to the end, and return what to log."""
        for _ in range(min(self.settings.log_every, self.total - self.done)):
            self.round()
        due = self.done % self.settings.validate_every == 0
        return self.line(validate=due or self.done == self.total)

    def round(self) -> None:
        """Take one step, with a gradient per batch, without waiting for the device."""
        choice = self.settings.choice
        rate = optimizers.factor(self.done, self.total, choice.warm_up, choice.warm_down)
        self.team.set_factor(rate)
        for part in self.parts:
            self._loss += self.gradient(self.draw(part)) / len(self.parts)
            with self.stopwatch.lap():
                self.team.step()
        self.done += 1

    def draw(self, part: int) -> Tensor:
        """Return this process's sequences of this step's batch, on the device."""
        drawn = torch.from_numpy(self.data.draw(self.done, part))
        if self.split:
            drawn = drawn.chunk(ranks.count())[ranks.rank()]
        if self.device.type == "cuda":
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn

    def gradient(self, sequences: Tensor) -> Tensor:
        """Add the gradient of the mean loss to the parameters' and return the loss."""
        total = torch.zeros((), device=self.device)
        for part in sequences.split(self.micro):
            loss = self.loss(part) * (len(part) / len(sequences))
            loss.backward()
            total += loss.detach()
        return total

    def loss(self, sequences: Tensor) -> Tensor:
        lower = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=lower):
            return self.model(sequences[:, :-1], sequences[:, 1:])

    @torch.no_grad()
    def evaluate(self, sequences: Tensor) -> float:
        """Return the loss on held-out sequences, of which each process takes a part."""
        total = torch.zeros((), device=self.device)
        own = sequences.tensor_split(ranks.count())[ranks.rank()]
        for part in own.split(self.micro):
            total += self.loss(part) * (len(part) / len(sequences))
        return ranks.total(total).item()

    def line(self, validate: bool) -> Line:
        """Return what to log now; waits for the device.

        `elapsed` are the seconds of training since the start of the run, with compiling and without
        validation; `optimizer_ms` is the time of all optimizer steps in a round, on average since
        the last line; `test_loss`, in the last line, is that of tokens that chose nothing.
        """
        rounds = self.done - self._logged
        loss = ranks.total(self._loss).item() / (rounds * ranks.count()) if rounds else None
        self.elapsed += time.perf_counter() - self._since if rounds else 0.0
        sizes = sizes_of(self.settings.model)
        # The first weights may guess worse than that: those of 1.5B parameters do.
        bound = DIVERGED * math.log(sizes.vocabulary) if self.done else math.inf
        value = self.evaluate(self.validation) if validate else None
        test = self.evaluate(self.test) if self.done == self.total and len(self.test) else None
        losses = [x for x in (loss, value) if x is not None]
        line: Line = {
            "step": self.done,
            "tokens": self.done * self.settings.sequences * sizes.context,
            "loss": finite_or_none(loss),
            "val_loss": finite_or_none(value),
            "test_loss": finite_or_none(test),
            "elapsed": round(self.elapsed, 3),
            "optimizer_ms": round(self.stopwatch.total() / rounds, 4) if rounds else None,
            "state_bytes": optimizers.state_bytes(self.team),
            "peak_bytes": self.peak_bytes(),
            "diverged": any(not x <= bound for x in losses),  # true for NaN as well
        }
        self._logged = self.done
        self._loss.zero_()
        self._since = time.perf_counter()
        return line

    def peak_bytes(self) -> int | None:
        """Return the most memory that tensors of the run had on the GPU, or None without one."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.device)

    def load(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        super().load(state)
        self._logged, self._since = self.done, time.perf_counter()


@lru_cache(maxsize=1)
def compiled_model(name: str, device: str) -> GPT2 | PlainGPT2:
    """Return a model that is compiled in parts, the same for all runs of a process.

    Compiling takes as long as many steps. Runs set the weights anew, so one must be over before the
    next begins.
    """
    torch.compiler.reset()  # what was compiled for another size is not needed any more
    with torch.device(device):  # these weights are never used, so draw them where it is fast
        model = models.build_by_name(name, 0)
    model.to(device)
    models.compile_in_parts(model)
    return model


@lru_cache(maxsize=3)
def first_weights(name: str, seed: int) -> dict[str, Tensor]:
    """Return the weights that a seed gives, on the CPU; drawing them anew takes seconds."""
    return models.build_by_name(name, seed).state_dict()


def share_work(batches: int, sequences: int) -> tuple[range, bool]:
    """Return the batches of this process, and whether it has a part of their sequences only.

    Raises:
        ValueError: neither can be shared equally.
    """
    processes = ranks.count()
    if batches % processes == 0:
        own = batches // processes
        return range(ranks.rank() * own, (ranks.rank() + 1) * own), False
    if sequences % processes:
        raise ValueError(
            f"{processes} processes must divide the batches of a step, {batches}, or the sequences "
            f"of a batch, {sequences}"
        )
    return range(batches), True


class Stopwatch:
    """A sum of times on a device, measured by events on a GPU, so that nothing has to wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def lap(self) -> Iterator[None]:
        start = self._now()
        yield
        self._laps.append((start, self._now()))

    def _now(self) -> Any:
        if not self._events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def total(self) -> float:
        """Return the milliseconds of the laps since the last call."""
        laps, self._laps = self._laps, []
        if not self._events:
            return 1000 * sum(end - start for start, end in laps)
        if laps:
            laps[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in laps)


def micro_batch(sizes: Sizes, sequences: int, device: torch.device) -> int:
    """Return the number of sequences to put through the model at once, a divisor of `sequences`.

    Logits cost most: in half precision, in float32, and the same for their gradients. A block keeps
    about 34 bytes per number of its input for the backward pass (twice that in float32).
    """
    factor = 1 if device.type == "cuda" else 2
    per_token = 12 * factor * sizes.rows + 34 * factor * sizes.layers * sizes.width
    free = CPU_MEMORY
    if device.type == "cuda":
        free = int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    room = max(1, free // (per_token * sizes.context))
    return max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= room)


def require_data(settings: Sequence[Settings], *, data: str | None = None, **options: Any) -> None:
    """Raise FileNotFoundError if tokens are missing, CorruptFileError if they do not suit."""
    for run in settings:
        tokens.locate(run.tokens, data)
    for name, model, sequences, validation in dict.fromkeys(
        (run.tokens, run.model, run.sequences, run.validation) for run in settings
    ):
        sizes = sizes_of(model)
        shape = {"context": sizes.context, "vocabulary": sizes.vocabulary}
        tokens.verify(name, data, sequences=sequences, validation=validation, **shape)


def missing_requirement(settings: Settings) -> str | None:
    """Return why this machine cannot do a run, or None."""
    return models.missing_requirement(settings.model) or optimizers.missing_requirement(
        settings.choice
    )
