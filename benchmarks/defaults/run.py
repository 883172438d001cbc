"""Train every task with every optimizer, schedule and seed, one JSON line a run."""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import torchpisa
from benchmarks import pool
from benchmarks.defaults.tasks import TASKS
from benchmarks.saved import read_saved
from torchpisa.optim import param_groups

__all__ = ["OPTIMIZERS", "OURS", "RATES", "SCHEDULES", "Key", "missing", "read", "run", "train"]

Run = dict[str, Any]
MEASUREMENTS = 10  # of validation, over a training


class Key(NamedTuple):
    """The identity of a run."""

    task: str
    optimizer: str
    schedule: str
    seed: int


# Optimizers


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _adamw(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(_trainable(model), lr=lr)]


def _muon(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    """Build Muon for hidden matrices, and AdamW for all other parameters."""
    hidden = {
        id(param)
        for group in param_groups.split(model)
        for _, param in group["params"]
        if group["matrix"] and param.ndim == 2
    }
    matrices = [param for param in _trainable(model) if id(param) in hidden]
    rest = [param for param in _trainable(model) if id(param) not in hidden]
    muon = [torch.optim.Muon(matrices, **settings)] if matrices else []
    return [*muon, *([torch.optim.AdamW(rest)] if rest else [])]


def _ours(
    cls: Callable[..., torch.optim.Optimizer], model: nn.Module, **settings: Any
) -> list[torch.optim.Optimizer]:
    return [cls(_trainable(model), **settings)]


RATES = (3e-4, 1e-3, 3e-3, 1e-2)
OURS = ("sisa", "nsisa", "misa")
# Each makes the optimizers of a model, as somebody would who has read no more than the signature.
# muon-rms is Muon as its documentation advises those who come with a learning rate of AdamW, and
# misa-0.001 is MISA with AdamW's own, which suits VGG-11 better than the default.
OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "sisa": partial(_ours, torchpisa.SISA),
    "nsisa": partial(_ours, torchpisa.NSISA),
    "misa": partial(_ours, torchpisa.MISA),
    "misa-0.001": partial(_ours, torchpisa.MISA, lr=1e-3),
    **{f"adamw-{lr:g}": partial(_adamw, lr=lr) for lr in RATES},
    "muon": _muon,
    "muon-rms": partial(_muon, adjust_lr_fn="match_rms_adamw"),
}
# What lr is multiplied by, from the share of the training that is over.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda over: 1.0,
    "cosine": lambda over: (1 + math.cos(math.pi * min(over, 1.0))) / 2,
}


def settings_of(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, dict[str, Any]]:
    """Return the defaults of optimizers, by class, as far as JSON can say them."""
    plain = (bool, int, float, str, type(None))

    def said(value: Any) -> Any:
        return value if isinstance(value, plain) and value != math.inf else str(value)

    return {
        type(opt).__name__: {name: said(value) for name, value in opt.defaults.items()}
        for opt in optimizers
    }


@cache
def current_settings(optimizer: str) -> dict[str, dict[str, Any]]:
    """Return the defaults that an optimizer has today."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return settings_of(OPTIMIZERS[optimizer](model))


# One run


def train(key: Key, fraction: float = 1.0) -> Run:
    """Train once, and measure.

    Args:
        key: the run.
        fraction: the fraction of the task's steps to take.
    """
    torch.set_num_threads(1)
    start, task = time.process_time(), TASKS[key.task]  # one thread: seconds of one core
    steps = max(1, round(fraction * task.steps))
    torch.manual_seed(key.seed)
    problem = task.make(key.seed)
    measured = sorted({round(steps * (i + 1) / MEASUREMENTS) for i in range(MEASUREMENTS)} - {0})
    splits = ("validation", "test") if task.averaged else ("validation",)
    curves: dict[str, list[float]] = {"validation": [], "test": []}
    untrained, finite = problem.measure("validation"), True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizers = [OPTIMIZERS[key.optimizer](module) for module in problem.modules]
        factor = SCHEDULES[key.schedule]
        schedulers = [
            LambdaLR(optimizer, lambda step: factor(step / steps))
            for of_module in optimizers
            for optimizer in of_module
        ]

        def update(loss: Tensor, module: int = 0) -> None:
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"loss is {loss.item()}")
            for opt in optimizers[module]:
                opt.zero_grad()
            loss.backward()
            for opt in optimizers[module]:
                opt.step()

        try:
            for step in range(1, steps + 1):
                problem.step(update)
                for scheduler in schedulers:
                    scheduler.step()
                if step in measured:
                    for split in splits:
                        curves[split].append(problem.measure(split))
            if not task.averaged:
                curves["test"].append(problem.measure("test"))
        except FloatingPointError:
            finite = False
    ends = [curve[-1] for curve in curves.values() if curve]
    finite = finite and all(map(math.isfinite, ends))

    def score(curve: list[float]) -> float | None:
        value = sum(curve) / len(curve) if task.averaged and curve else curve[-1] if curve else None
        return value if finite and value is not None and math.isfinite(value) else None

    return {
        **key._asdict(),
        "settings": current_settings(key.optimizer),
        "steps": steps,
        "validation": score(curves["validation"]),
        "test": score(curves["test"]),
        "untrained": untrained,
        "trivial": problem.trivial,
        # Worse than before the training, and worse than a model that knows nothing.
        "diverged": not finite or curves["test"][-1] > max(problem.trivial, untrained),
        "curve": [value if math.isfinite(value) else None for value in curves["validation"]],
        "warnings": sorted({str(warning.message) for warning in caught}),
        "seconds": round(time.process_time() - start, 2),
    }


def _train_or_explain(key: Key, fraction: float) -> Run:
    """Train once; an error of one run must not end the others."""
    try:
        return train(key, fraction)
    except Exception as error:
        settings = current_settings(key.optimizer)
        problem = f"{type(error).__name__}: {error}"
        return {**key._asdict(), "settings": settings, "error": problem, "diverged": True}


# Many runs


def read(path: Path, known: Iterable[Path] = ()) -> list[Run]:
    """Return runs, of those with the same key the last.

    Args:
        path: the file of lines.
        known: results that `report.write` has saved, whose runs come first.

    Raises:
        ValueError: a file of `known` holds no such results.
    """
    lines = [run for results in known for run in _read_results(results)]
    return list({key_of(run): run for run in lines + pool.read_lines(path)}.values())


def _read_results(path: Path) -> list[Run]:
    entries = {"runs": list, "settings": dict, "machines": list, "tasks": dict}
    saved = read_saved("--known", path, "python -m benchmarks defaults report", **entries)
    return [
        {**run, "settings": saved["settings"][run["optimizer"]], "machines": saved["machines"]}
        for run in saved["runs"]
    ]


def key_of(run: Run) -> Key:
    """Return what tells a run from the others."""
    return Key(*(run[field] for field in Key._fields))


def missing(keys: Iterable[Key], runs: Iterable[Run], fraction: float = 1.0) -> Iterator[Key]:
    """Yield the keys without a run, or with one that failed or had other settings or steps."""
    done = {key_of(run): run for run in runs}
    for key in keys:
        run = done.get(key, {"error": "not run"})
        steps = max(1, round(fraction * TASKS[key.task].steps))
        if (
            "error" in run
            or run["settings"] != current_settings(key.optimizer)
            or run["steps"] != steps
        ):
            yield key


def run(
    keys: Iterable[Key],
    path: Path,
    jobs: int,
    limit_seconds: float = math.inf,
    fraction: float = 1.0,
) -> int:
    """Train, and append a line for each run; return how many were left undone.

    Args:
        keys: the runs.
        path: the file for the lines.
        jobs: processes.
        limit_seconds: after which no run begins.
        fraction: the fraction of the steps to take.
    """
    work = partial(_train_or_explain, fraction=fraction)
    return pool.append_lines(work, keys, path, jobs, limit_seconds, _describe)


def _describe(result: Run) -> str:
    name = " ".join(str(result[field]) for field in Key._fields)
    if "error" in result:
        return f"{name}: {result['error']}"
    return f"{name}: {'diverged' if result['diverged'] else result['test']} ({result['seconds']} s)"
