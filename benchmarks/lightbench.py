"""LightBench's synthetic tasks, with our optimizers and AdamW: `python -m benchmarks lightbench`.

    pip install 'torchpisa[benchmarks]'
    python -m benchmarks lightbench            # try what is not in runs/lightbench.jsonl yet
    python -m benchmarks lightbench report     # docs/results/lightbench.json and .md

LightBench (PyPI, 0.1.1) has 51 problems in up to six difficulties, each with a condition for having
been solved. Problems and conditions are its own. The search is not: LightBench tries up to 1,000
settings of learning rate and betas for up to 100,000 steps each, and counts a task as solved if one
of them does it. Here an optimizer gets its own learning rate times a few factors, `FACTORS`, and
a few thousand steps, so its published rates are beside ours for orientation and no comparison;
AdamW under the same budget is the comparison. As there, who fails at a difficulty fails at the
harder ones. Everything runs on the CPU, without the tasks in `LEFT_OUT`.
"""

import argparse
import copy
import importlib
import inspect
import json
import math
import os
import re
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks import pool
from benchmarks.defaults.run import OPTIMIZERS, current_settings

__all__ = ["main"]

COMPARED = ("sisa", "nsisa", "misa", "adamw-0.001")
DIFFICULTIES = ("trivial", "easy", "medium", "hard", "extreme", "nightmare")
FACTORS = (1.0, 10.0, 0.1, 100.0, 0.01)  # the defaults first
STEPS = 4000
SECONDS = 60.0  # of one core, for one try
# From which difficulty on, and why.
LEFT_OUT = {
    "memory_constrained": ("trivial", "measures the memory of a GPU"),
    "quadratic_quantized_gradient": ("easy", "raises, in version 0.1.1"),
    "quadratic_quantization_aware_training": ("easy", "raises, in version 0.1.1"),
    "plasticity_summod": ("medium", "needs more than 14,000 steps"),
    "plasticity_weighted_summod": ("medium", "needs more than 14,000 steps"),
    "wide_linear": ("hard", "too large for one core"),
    "noisy_matmul": ("medium", "more than 40 ms a gradient"),
    "xor_digit": ("extreme", "more than 40 ms a gradient"),
    "xor_spot": ("extreme", "more than 40 ms a gradient"),
    "multi_objective_pareto": ("nightmare", "more than 40 ms a gradient"),
    "class_imbalance_rare": ("nightmare", "more than 40 ms a gradient"),
    "transfer_domain_shift": ("extreme", "more than 40 ms a gradient"),
}
# Successes and tasks in the table that comes with version 0.1.1.
PUBLISHED = {
    "AdamW": (107, 148),
    "SOAP": (111, 153),
    "Muon": (78, 153),
    "PSGD (Kron, cached)": (114, 148),
}
Line = dict[str, Any]


class OnCPU(TorchFunctionMode):
    """A context that puts on the CPU what LightBench puts on a GPU by name."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@dataclass
class Problem:
    """The problem that a module of LightBench passes to its search."""

    model: nn.Module
    data: Callable[[], tuple[Any, Any]] | None
    loss: Callable[[Tensor, Any], Tensor] | None
    won: Callable[[nn.Module, float], tuple[bool, dict[str, Any]]]


def import_utils() -> types.ModuleType:
    """Import lightbench.utils without its search, which needs a dozen packages.

    Raises:
        ModuleNotFoundError: LightBench is not installed.
    """
    for name in ("optuna", "heavyball.helpers"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["heavyball.helpers"].__dict__.setdefault("AutoSampler", None)
    try:
        return importlib.import_module("lightbench.utils")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"there is no {error.name}: pip install 'torchpisa[benchmarks]'"
        ) from error


def import_problem(name: str) -> types.ModuleType:
    """Import a module of LightBench."""
    import_utils()
    return importlib.import_module(f"lightbench.{name}")


def benchmarks() -> list[str]:
    """Return the names of the problems that LightBench's own runner has."""
    import_utils()
    package = importlib.import_module("lightbench")
    runner = Path(str(package.__file__)).with_name("run_all_benchmarks.py").read_text()
    names = re.findall(r'^ +"(\w+)\.py",$', runner, re.MULTILINE)
    return [name for name in names if LEFT_OUT.get(name, ("",))[0] != DIFFICULTIES[0]]


def difficulties(name: str) -> list[str]:
    """Return the difficulties of a problem that are tried, easiest first."""
    module = import_problem(name)
    end, _ = LEFT_OUT.get(name, (None, ""))
    tried = DIFFICULTIES[: DIFFICULTIES.index(end) if end else None]
    return [level for level in tried if level in getattr(module, "configs", ("trivial",))]


def load(name: str, difficulty: str, seed: int) -> Problem:
    """Return a problem."""
    utils, module = import_utils(), import_problem(name)
    captured: list[Problem] = []

    def capture(
        model: nn.Module, data: Any, loss_fn: Any, win_condition: Any, *_: Any, **options: Any
    ) -> None:
        dtype = utils._resolve_dtype(options.get("dtype"))
        captured.append(Problem(model.to(dtype=dtype), data, loss_fn, win_condition))

    vars(module)["trial"] = capture
    options = inspect.signature(module.main).parameters
    several = isinstance(getattr(options["dtype"].default, "default", None), list)
    arguments = {
        "dtype": ["float32"] if several else "float32",
        "steps": STEPS,
        "weight_decay": 0,
        "opt": [],
        "trials": 1,
        "win_condition_multiplier": 1.0,
        "config": difficulty,
    }
    torch.manual_seed(seed)
    with OnCPU():
        module.main(**{key: value for key, value in arguments.items() if key in options})
    return captured[0]


def solve(problem: Problem, optimizer: str, factor: float, steps: int, seed: int) -> int | None:
    """Return the step at which a copy of the problem is solved, or None if it is not."""
    torch.manual_seed(seed)
    model = copy.deepcopy(problem.model)
    optimizers, start = OPTIMIZERS[optimizer](model), time.process_time()
    for group in (group for opt in optimizers for group in opt.param_groups):
        group["lr"] *= factor
    for step in range(1, steps + 1):
        with OnCPU():
            inputs, target = problem.data() if problem.data else (None, None)
            output = model() if inputs is None else model(inputs)
            loss = problem.loss(output, target) if problem.loss else output
            value = loss.item()
            if not math.isfinite(value) or time.process_time() - start > SECONDS:
                return None
            if problem.won(model, value)[0]:
                return step
        for opt in optimizers:
            opt.zero_grad()
        loss.backward()
        try:
            for opt in optimizers:
                opt.step()
        except FloatingPointError:
            return None
    return None


def climb(item: tuple[str, str, int], steps: int = STEPS) -> Line:
    """Try one problem, with one optimizer and seed, from the first difficulty to the last."""
    name, optimizer, seed = item
    torch.set_num_threads(1)
    start, tries, failed = time.process_time(), [], False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for difficulty in difficulties(name):
            factor, step, error = None, None, None
            try:
                # Not even loaded after a failure: the hardest ones are large.
                problem = None if failed else load(name, difficulty, seed)
                for factor in FACTORS if problem else ():
                    step = solve(problem, optimizer, factor, steps, seed)
                    if step:
                        break
            except Exception as problem_found:  # of one task; the others go on
                error = f"{type(problem_found).__name__}: {problem_found}"
            failed = step is None
            attempt = {"difficulty": difficulty, "factor": None if failed else factor, "step": step}
            tries.append({**attempt, "error": error} if error else attempt)
    return {
        "benchmark": name,
        "optimizer": optimizer,
        "seed": seed,
        "settings": current_settings(optimizer),
        "steps": steps,
        "tries": tries,
        "seconds": round(time.process_time() - start, 2),
    }


def _describe(line: Line) -> str:
    solved = sum(one["step"] is not None for one in line["tries"])
    name = f"{line['benchmark']} {line['optimizer']} {line['seed']}"
    return f"{name}: {solved} of {len(line['tries'])} ({line['seconds']} s)"


# The report


def rates(lines: Iterable[Line]) -> dict[str, tuple[int, int, int]]:
    """Return per optimizer: tasks solved, of these with its default rate, and all tasks."""
    counts: dict[str, tuple[int, int, int]] = {}
    for line in lines:
        solved, at_once, tasks = counts.get(line["optimizer"], (0, 0, 0))
        for one in line["tries"]:
            solved += one["step"] is not None
            at_once += one["factor"] == 1.0
        counts[line["optimizer"]] = (solved, at_once, tasks + len(line["tries"]))
    return counts


def page(lines: list[Line]) -> str:
    """Return the rates of success as Markdown, published ones below ours."""
    steps = max(line["steps"] for line in lines)
    problems = len({line["benchmark"] for line in lines})
    rows = [
        "| optimizer | solved | solved with its default rate |",
        "|---|---|---|",
        *(
            f"| {name} | {solved} of {tasks} ({100 * solved / tasks:.0f} %) "
            f"| {at_once} of {tasks} ({100 * at_once / tasks:.0f} %) |"
            for name, (solved, at_once, tasks) in rates(lines).items()
        ),
        *(
            f"| {name}, published: up to 1,000 settings | {solved} of {tasks} "
            f"({100 * solved / tasks:.0f} %) | |"
            for name, (solved, tasks) in PUBLISHED.items()
        ),
        "",
        f"{problems} of LightBench 0.1.1's 51 problems, its conditions; at most {steps:,} steps "
        f"and {SECONDS:g} seconds of one core a try, without what `LEFT_OUT` names. A try has the "
        f"optimizer's own learning rate times {', '.join(f'{f:g}' for f in FACTORS)}, betas and "
        "momentum as they are. The published rates come from a search of up to 1,000 settings of "
        "learning rate and betas with up to 100,000 steps each, and are no comparison.",
    ]
    return "\n".join(rows) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks lightbench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("action", nargs="?", choices=("run", "report"), default="run")
    add("--runs", type=Path, default=Path("runs/lightbench.jsonl"), help="default: %(default)s")
    add("--only", nargs="+", metavar="BENCHMARK", help="default: all")
    add("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(COMPARED), metavar="NAME")
    add("--seeds", type=int, default=1, help="default: 1")
    add("--steps", type=int, default=STEPS, help="at most; default: %(default)s")
    add("--jobs", type=int, default=os.cpu_count(), help="processes; default: one per core")
    add("--limit-seconds", type=float, default=math.inf, help="after which nothing begins")
    add("--results", type=Path, default=Path("docs/results"), help="of report; %(default)s")
    args = parser.parse_args(arguments)
    for name in ("seeds", "steps", "jobs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    saved = {
        (line["benchmark"], line["optimizer"], line["seed"]): line
        for line in pool.read_lines(args.runs)
    }
    if args.action == "report":
        if not saved:
            parser.error(f"--runs must be a file with runs, got {args.runs}")
        args.results.mkdir(parents=True, exist_ok=True)
        lines = list(saved.values())
        text = "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n"
        (args.results / "lightbench.json").write_text(text)
        (args.results / "lightbench.md").write_text(page(lines))
        return
    names = benchmarks()
    for name in args.only or ():
        if name not in names:
            parser.error(f"--only must name some of {', '.join(names)}, got {name}")
    items = [
        (name, optimizer, seed)
        for seed in range(args.seeds)
        for name in args.only or names
        for optimizer in args.optimizers
    ]
    todo = [
        item
        for item in items
        if item not in saved
        or saved[item]["settings"] != current_settings(item[1])
        or saved[item]["steps"] != args.steps
    ]
    print(f"{len(todo)} of {len(items)} runs to do, {args.jobs} at a time")
    work = partial(climb, steps=args.steps)
    left = pool.append_lines(work, todo, args.runs, args.jobs, args.limit_seconds, _describe)
    print(f"{args.runs}: {f'{left} runs left' if left else 'complete'}")
