"""One run: the model, the tokens, the optimizers, and the loss as steps go by."""

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.language import optimizers, tokens
from recipes.language.config import Config, Settings
from recipes.language.model import SIZES, Sizes, build
from recipes.recipe import Line

__all__ = ["Training", "lacks", "micro_batch", "ready", "run"]

DIVERGED = 2.0  # times the loss of a guess
MEMORY_SHARE = 0.6  # of what is free, for one forward and backward pass
CPU_MEMORY = 2**31  # bytes for one, where nobody says how much there is


def run(
    config: Config,
    settings: Settings,
    *,
    device: str,
    data: str | None = None,
    compile: bool = False,
    checkpoints: str | None = None,
) -> Iterator[Line]:
    """Yield losses, times and bytes of state every few steps; one that diverges ends early.

    Args:
        config: for `save_every`.
        settings: of the run.
        device: where.
        data: the data folder.
        compile: whether torch.compile compiles the model.
        checkpoints: folder to save in and to resume from; None for neither. The file of a run is
            removed when it is done.
    """
    training = Training(settings, torch.device(device), data, compile)
    file = None if checkpoints is None else Path(checkpoints) / f"{settings.name}.pt"
    lines = [] if file is None else resume(training, file)
    # A log is written from its beginning, so what it had is handed out again.
    yield from lines
    if not lines:
        lines.append(training.line(validate=True))
        yield lines[-1]
    while training.step < settings.steps and not lines[-1]["diverged"]:
        count = min(settings.log_every, settings.steps - training.step)
        for _ in range(count):
            training.round()
        last = training.step == settings.steps
        line = training.line(validate=last or training.step % settings.validate_every == 0)
        lines.append(line)
        if file is not None and not last and training.step % config.save_every == 0:
            save(training, lines, file)
        yield line
    if file is not None:
        file.unlink(missing_ok=True)


class Training:
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
        self.settings, self.device, self.step = settings, device, 0
        sizes = SIZES[settings.model]
        train, validation = tokens.load(settings.tokens, data)
        share = settings.sequences // settings.batches
        shape = sizes.context, sizes.vocabulary
        self.data = tokens.Batches(train, settings.batches, share, *shape)
        held_out = tokens.windows(validation, 0, settings.validation, *shape)
        self.validation = torch.from_numpy(held_out).to(device)
        self.model = build(sizes, settings.seed).to(device)
        self.team = optimizers.build(settings.choice, self.model, settings.batches)
        self.micro = settings.micro or micro_batch(sizes, share, device)
        self.forward = torch.compile(self.model) if compile else self.model
        self.stopwatch = Stopwatch(device)
        self.elapsed, self._since = 0.0, time.perf_counter()
        self._logged = 0  # the step of the last line
        self._loss = torch.zeros((), device=device)  # added up since then

    def round(self) -> None:
        """A step: a gradient per batch. Nothing in it waits for the device."""
        choice, batches = self.settings.choice, self.settings.batches
        rate = optimizers.factor(self.step, self.settings.steps, choice.warm_up, choice.warm_down)
        self.team.set_factor(rate)
        for part in range(batches):
            self._loss += self.gradient(self.draw(part)) / batches
            with self.stopwatch.lap():
                self.team.step()
        self.step += 1

    def draw(self, part: int) -> Tensor:
        """The sequences of this step's batch, on the device."""
        drawn = torch.from_numpy(self.data.draw(self.step, part))
        if self.device.type == "cuda":
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn

    def gradient(self, sequences: Tensor) -> Tensor:
        """Add the gradient of their mean loss to the parameters'; returns the loss."""
        total = torch.zeros((), device=self.device)
        for some in sequences.split(self.micro):
            loss = self.loss(some) * (len(some) / len(sequences))
            loss.backward()
            total += loss.detach()
        return total

    def loss(self, sequences: Tensor) -> Tensor:
        lower = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=lower):
            return self.forward(sequences[:, :-1], sequences[:, 1:])

    @torch.no_grad()
    def validate(self) -> float:
        """The loss on the validation tokens."""
        total = torch.zeros((), device=self.device)
        for some in self.validation.split(self.micro):
            total += self.loss(some) * (len(some) / len(self.validation))
        return total.item()

    def line(self, validate: bool) -> Line:
        """What there is to log now; waits for the device.

        `elapsed` are the seconds of training, without validation, since the start of the run, in
        which compiling is the first; `optimizer_ms` is the time of all optimizer steps in a round,
        on average since the last line.
        """
        rounds = self.step - self._logged
        loss = self._loss.item() / rounds if rounds else None
        self.elapsed += time.perf_counter() - self._since if rounds else 0.0
        sizes = SIZES[self.settings.model]
        bound = DIVERGED * math.log(sizes.vocabulary)
        value = self.validate() if validate else None
        seen = [x for x in (loss, value) if x is not None]
        line: Line = {
            "step": self.step,
            "tokens": self.step * self.settings.sequences * sizes.context,
            "loss": finite(loss),
            "val_loss": finite(value),
            "elapsed": round(self.elapsed, 3),
            "optimizer_ms": round(self.stopwatch.total() / rounds, 4) if rounds else None,
            "state_bytes": optimizers.state_bytes(self.team),
            "diverged": any(not x <= bound for x in seen),  # written so that NaN is among them
        }
        self._logged = self.step
        self._loss.zero_()
        self._since = time.perf_counter()
        return line

    def state(self) -> dict[str, Any]:
        """All that it takes to go on; right after a line."""
        parts = {"model": self.model.state_dict(), "optimizers": self.team.state_dict()}
        return {"settings": key(self.settings), "step": self.step, **parts}

    def load(self, state: dict[str, Any], elapsed: float) -> None:
        """Go on from what `state` gave."""
        self.model.load_state_dict(state["model"])
        self.team.load_state_dict(state["optimizers"])
        self.step = self._logged = state["step"]
        self.elapsed, self._since = elapsed, time.perf_counter()


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


class Stopwatch:
    """Adds up the time of a device; on a GPU by events, so that nobody waits for them before."""

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
        """Milliseconds of the laps since it was asked last."""
        laps, self._laps = self._laps, []
        if not self._events:
            return 1000 * sum(end - start for start, end in laps)
        if laps:
            laps[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in laps)


def micro_batch(sizes: Sizes, sequences: int, device: torch.device) -> int:
    """How many sequences go through the model at once: a divisor, so that all are alike.

    Logits cost most: in half precision, in float32, and the same for their gradients. A block keeps
    about 34 bytes per number of its input for the backward pass (twice that in float32).
    """
    whole = 1 if device.type == "cuda" else 2
    per_token = 12 * whole * sizes.rows + 34 * whole * sizes.layers * sizes.width
    free = CPU_MEMORY
    if device.type == "cuda":
        free = int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0])
    room = max(1, free // (per_token * sizes.context))
    return max(n for n in range(1, sequences + 1) if sequences % n == 0 and n <= room)


# Checkpoints


def key(settings: Settings) -> str:
    """What a checkpoint must be of."""
    return json.dumps(dataclasses.asdict(settings), sort_keys=True)


def save(training: Training, lines: Sequence[Line], file: Path) -> None:
    """Save a run with its log; an interruption leaves the file as it was."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save({**training.state(), "lines": list(lines)}, partial)
    os.replace(partial, file)


def resume(training: Training, file: Path) -> list[Line]:
    """Load a checkpoint, if there is one of the same settings; returns what it had logged."""
    if not file.is_file():
        return []
    state = torch.load(file, map_location=training.device, weights_only=True)
    if state["settings"] != key(training.settings):
        return []
    lines: list[Line] = state["lines"]
    training.load(state, float(lines[-1]["elapsed"] or 0))
    return lines


# Before the runs


def ready(settings: Sequence[Settings], *, data: str | None = None, **options: Any) -> None:
    """Raise FileNotFoundError if tokens are missing."""
    for name in dict.fromkeys(each.tokens for each in settings):
        tokens.locate(name, data)


def lacks(settings: Settings) -> str | None:
    """Why this machine cannot do a run, or None."""
    return optimizers.lacks(settings.choice)
