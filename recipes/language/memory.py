"""The memory table: peak memory of a training step by optimizer, size and number of batches.

    python -m recipes language memory --device cuda --compile --out runs/memory
    python -m recipes language memory --show docs/results/language_memory.json

A cell takes a few steps on random tokens, with a model and an optimizer of its own, and nothing
else on the device. The peaks of the forward and backward passes and of the optimizer's step are
taken apart: only the former grows with the batch. Beside them stand the bytes of state, measured
and by formula, and what the paper reports.
"""

import argparse
import dataclasses
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.saved import read_saved
from recipes.execution import print_line
from recipes.language import optimizers
from recipes.language.model import GPT2, SIZES, TITLES, Sizes, compile_in_parts
from recipes.language.optimizers import choose
from recipes.recipe import Check, Results
from recipes.tables import checks_table, markdown
from torchpisa.optim.accumulated import AccumulationWarning

__all__ = ["PAPER", "Cell", "check", "formula", "largest_batch", "main", "measure", "plan"]
__all__ += ["report"]

MIB, GIB = 2**20, 2**30
ROUNDS = 3
PAPER = {
    "gpt2": {"nsisa": 22998, "adamw": 22996, "muon": 22998}
    | {"shampoo": 24336, "soap": 26432, "adam_mini": 22996},
    "gpt2-medium": {"nsisa": 50580, "adamw": 50658, "muon": 47860}
    | {"shampoo": 54794, "soap": 58812, "adam_mini": 47548},
    "gpt2-xl": {"nsisa": 55126, "adamw": 53128, "muon": 50657}
    | {"shampoo": 68146, "soap": 93630, "adam_mini": 50658},
}
"""MiB of the paper's table on memory, for whole trainings; its AdamW is called Adam."""

# Sequences of a pass and passes of a batch: the paper's of Medium and XL. It has none for Nano.
BATCHES = {"gpt2": (16, 1), "gpt2-medium": (16, 1), "gpt2-xl": (4, 4)}
CHOICES = {
    "adamw": choose("adamw"),
    "nsisa": choose("nsisa"),
    "muon": choose("muon"),
    "misa": choose("misa", rest="own"),
    "adam_mini": choose("adam_mini"),
    "sisa": choose("sisa"),
    "shampoo": choose("shampoo"),
    "soap": choose("soap"),
}
CONSENSUS = ("nsisa", "misa", "sisa")  # the others average, so m = 4 is m = 1 for them
# Decomposing matrices of 6,400 rows takes minutes in 48 blocks, and every block needs the same.
EXTRAPOLATED = {("soap", "gpt2-medium"), ("soap", "gpt2-xl")}
FEW_LAYERS = (1, 2)
CARDS = {"24 GB": 24, "40 GB": 40, "80 GB": 80, "141 GB": 141}
RESERVED = 1.0  # GiB of a card for the driver and for gaps between tensors


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        model: one of `SIZES`.
        optimizer: one of `CHOICES`.
        batches: m.
        micro: sequences of a forward and backward pass.
        passes: whose gradients make a batch.
        recompute: whether blocks are computed again in the backward pass.
        layers: of the model; None for all.
    """

    model: str
    optimizer: str
    batches: int = 1
    micro: int = 16
    passes: int = 1
    recompute: bool = False
    layers: int | None = None

    @property
    def name(self) -> str:
        words = [self.model, self.optimizer, f"m{self.batches}", f"{self.micro}x{self.passes}"]
        words += ["recompute"] if self.recompute else []
        words += [f"{self.layers}layers"] if self.layers else []
        return "_".join(words)

    @property
    def sizes(self) -> Sizes:
        sizes = SIZES[self.model]
        return sizes if self.layers is None else dataclasses.replace(sizes, layers=self.layers)


def plan(models: Sequence[str]) -> list[Cell]:
    """Return the cells of the table, what is compared first."""
    cells = []
    for model in models:
        micro, passes = BATCHES.get(model, (4, 1))
        base = Cell(model, "adamw", 1, micro, passes)
        for name in CHOICES:
            few = FEW_LAYERS if (name, model) in EXTRAPOLATED else (None,)
            cells += [dataclasses.replace(base, optimizer=name, layers=n) for n in few]
        cells += [dataclasses.replace(base, optimizer=name, batches=4) for name in CONSENSUS]
        # How much a sequence needs, without and with computing blocks again.
        cells.append(dataclasses.replace(base, micro=2 * micro))
        cells += [dataclasses.replace(base, recompute=True, micro=n * micro) for n in (1, 2)]
    return cells


def measure(cell: Cell, device: torch.device, compile: bool = False) -> dict[str, Any]:
    """Take a few steps and return the peaks of passes and steps, and the bytes of state.

    Peaks are None on a CPU; `error` says if memory did not suffice.
    """
    start = time.perf_counter()
    line: dict[str, Any] = {**dataclasses.asdict(cell), "error": None}
    try:
        line |= take_steps(cell, device, compile)
    except torch.OutOfMemoryError:
        line["error"] = "out of memory"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    line["seconds"] = round(time.perf_counter() - start, 2)
    return line


def take_steps(cell: Cell, device: torch.device, compile: bool) -> dict[str, Any]:
    gpu = device.type == "cuda"
    if gpu:
        torch.set_float32_matmul_precision("high")
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
    sizes = cell.sizes
    with torch.device(device):
        model = GPT2(sizes, recompute=cell.recompute)
    model.to(device)
    if compile:
        compile_in_parts(model)
    team = optimizers.build(CHOICES[cell.optimizer], model, cell.batches)
    shape = cell.micro, sizes.context + 1
    tokens = torch.randint(sizes.vocabulary, shape, device=device)
    peaks = {"pass": 0, "step": 0}

    def peak_of(phase: str, work: Callable[[], None]) -> None:
        if gpu:
            torch.cuda.reset_peak_memory_stats(device)
        work()
        if gpu:
            peaks[phase] = max(peaks[phase], torch.cuda.max_memory_allocated(device) - before)

    def backward() -> None:
        for _ in range(cell.passes):
            with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            (loss / cell.passes).backward()

    with warnings.catch_warnings():
        # The passes of a batch are meant to add up.
        warnings.simplefilter("ignore", AccumulationWarning)
        for _ in range(ROUNDS * cell.batches):
            peak_of("pass", backward)
            peak_of("step", team.step)
    return {
        "parameters": sizes.parameters,
        "pass_bytes": peaks["pass"] if gpu else None,
        "step_bytes": peaks["step"] if gpu else None,
        "state_bytes": optimizers.state_bytes(team),
    }


# Formulas


def formula(name: str, sizes: Sizes, batches: int = 1) -> int:
    """Return the bytes of state that an optimizer of `CHOICES` should have, in float32."""
    rest, width = sizes.rows * sizes.width, sizes.width
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    matrices = sizes.layers * sum(rows * cols for rows, cols in shapes)
    # A dual and a moment or momentum per batch, and with several the sum of their contributions.
    consensus = 2 * batches + (batches > 1)
    numbers = {
        "adamw": 2 * (matrices + rest),
        "muon": matrices + 2 * rest,
        "sisa": consensus * (matrices + rest),
        "nsisa": consensus * matrices + 2 * rest,
        # The sum over several batches is there within a round only.
        "misa": matrices + sizes.layers * sum(rows for rows, _ in shapes) + 2 * rest,
        # Queries and keys have a second moment per head; that of other matrices is one number.
        "adam_mini": matrices + 2 * sizes.layers * sizes.heads + 2 * rest,
        "soap": 2 * (matrices + rest)
        + sizes.layers * sum(2 * (rows**2 + cols**2) for rows, cols in shapes),
        "shampoo": 3 * matrices
        + 2 * rest
        + sizes.layers * sum(2 * shampoo_entries(rows, cols) for rows, cols in shapes),
    }
    return 4 * numbers[name]


def shampoo_entries(rows: int, cols: int) -> int:
    """Return the entries of the left and right matrices of a matrix in blocks."""
    block = CHOICES["shampoo"].options["block_size"]
    parts = [[min(block, size - at) for at in range(0, size, block)] for size in (rows, cols)]
    (left, right) = parts
    return sum(n * n for n in left) * len(right) + sum(n * n for n in right) * len(left)


# Tables


def find(cells: Sequence[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any] | None:
    """Return the first cell with these values that was measured, or None."""
    for cell in cells:
        if cell["error"] is None and all(cell[key] == value for key, value in wanted.items()):
            return cell
    return None


def full_size(
    cells: Sequence[Mapping[str, Any]], model: str, optimizer: str, batches: int = 1
) -> dict[str, Any] | None:
    """Return the cell of the table, from few layers where not all were measured."""
    micro, _ = BATCHES.get(model, (4, 1))
    wanted = {"model": model, "optimizer": optimizer, "batches": batches, "micro": micro}
    whole = find(cells, **wanted, recompute=False, layers=None)
    if whole is not None:
        return dict(whole)
    one, two = (find(cells, **wanted, recompute=False, layers=n) for n in FEW_LAYERS)
    if one is None or two is None:
        return None
    more = SIZES[model].layers - FEW_LAYERS[1]
    names = ["state_bytes"]
    if two["pass_bytes"] is not None:
        names += ["pass_bytes", "step_bytes"]
    return {**two, **{name: two[name] + more * (two[name] - one[name]) for name in names}}


def peak(cell: Mapping[str, Any]) -> int:
    """Return the peak of a whole step."""
    return int(max(cell["pass_bytes"], cell["step_bytes"]))


def rows_of(results: Results) -> Iterator[tuple[str, str, int, dict[str, Any]]]:
    """Yield model, optimizer, batches and cell, in the order of the table.

    Measured on a CPU, a cell has bytes of state and no peaks.
    """
    cells = results["cells"]
    for model in dict.fromkeys(cell["model"] for cell in cells):
        for batches in (1, 4):
            for name in CHOICES:
                cell = full_size(cells, model, name, batches)
                if cell is not None:
                    yield model, name, batches, cell


def check(results: Results) -> list[Check]:
    """Check that ours need no more memory than what they replace."""
    checks = []
    table = {
        (model, name): cell
        for model, name, m, cell in rows_of(results)
        if m == 1 and cell["pass_bytes"] is not None
    }
    for model in dict.fromkeys(model for model, _ in table):
        for ours, theirs in (("nsisa", "adamw"), ("misa", "muon")):
            if (model, ours) in table and (model, theirs) in table:
                a, b = peak(table[model, ours]), peak(table[model, theirs])
                titles = optimizers.TITLES[ours], optimizers.TITLES[theirs]
                checks.append(
                    Check(
                        TITLES.get(model, model),
                        f"{titles[0]} needs at most 2 % more than {titles[1]}, m = 1",
                        f"{a / MIB:,.0f} and {b / MIB:,.0f} MiB ({a / b - 1:+.1%})",
                        a <= 1.02 * b,
                    )
                )
    return checks


def largest_batch(
    cells: Sequence[Mapping[str, Any]], model: str, optimizer: str, room: float, recompute: bool
) -> int | None:
    """Return the most sequences of a pass that fit into so many GiB; None if it is not known.

    What a sequence needs was measured with AdamW: by two batches or, where there is one only, as
    what its passes need beside weights, gradients and state. What is there before a pass differs
    by the optimizer's state.
    """
    cell, adamw = (full_size(cells, model, name) for name in (optimizer, "adamw"))
    wanted = {"model": model, "optimizer": "adamw", "batches": 1, "layers": None}
    micro, _ = BATCHES.get(model, (4, 1))
    a = find(cells, **wanted, recompute=recompute, micro=micro)
    b = find(cells, **wanted, recompute=recompute, micro=2 * micro)
    if cell is None or adamw is None or a is None or cell["pass_bytes"] is None:
        return None
    beside = 8 * a["parameters"] + a["state_bytes"]
    more = a["pass_bytes"] - beside if b is None else b["pass_bytes"] - a["pass_bytes"]
    fixed = a["pass_bytes"] - more + cell["pass_bytes"] - adamw["pass_bytes"]
    bytes_there = (room - RESERVED) * GIB
    if cell["step_bytes"] > bytes_there:
        return 0
    return max(0, int((bytes_there - fixed) * micro // more))


def report(results: Results) -> str:
    """Return all tables."""
    lines = []
    for model, name, batches, cell in rows_of(results):
        adamw = full_size(results["cells"], model, "adamw")
        paper = PAPER[model].get(name) if model in PAPER and batches == 1 else None
        peaks, difference = ["-", "-", "-"], "-"
        if cell["pass_bytes"] is not None:
            peaks = [f"{cell[part] / MIB:,.0f}" for part in ("pass_bytes", "step_bytes")]
            peaks.append(f"**{peak(cell) / MIB:,.0f}**" + (" †" if cell["layers"] else ""))
            difference = f"{(peak(cell) - peak(adamw)) / MIB:+,.0f}" if adamw else "-"
        theirs = f"{paper - PAPER[model]['adamw']:+,d}" if paper else "-"
        expected = formula(name, SIZES[model], batches)
        lines.append(
            [
                *(TITLES.get(model, model), optimizers.TITLES[name], batches),
                *(f"{expected / MIB:,.0f}", f"{cell['state_bytes'] / MIB:,.0f}", *peaks),
                *(difference, f"{paper:,d}" if paper else "-", theirs),
            ]
        )
    heads = ["", "optimizer", "m", "state by formula", "state", "passes", "optimizer's step"]
    heads += ["**peak**", "less AdamW's", "the paper's peak", "less its Adam's"]
    config = results["config"]
    batch = ", ".join(
        f"{TITLES.get(model, model)} {passes} x {micro}"
        for model, (micro, passes) in ((m, BATCHES.get(m, (4, 1))) for m in config["models"])
    )
    parts = [
        "MiB on one GPU: state, the peak of forward and backward passes, that of the optimizer's "
        f"step, and the larger of the two. A batch has, in passes x sequences of 1,024 tokens, "
        f"{batch}: the paper's for Medium and XL (it names none for Nano). With m = 4 there are "
        "four such batches in a round. Weights and gradients are float32, forward passes bfloat16"
        f"{', compiled' if config['compile'] else ''}. † from models of 1 and 2 blocks.",
        markdown(heads, lines),
    ]
    fits = fitting_batches(results)
    if fits:
        parts += [fits]
    failed = [cell for cell in results["cells"] if cell["error"]]
    parts += [f"{Cell(**fields(cell)).name}: {cell['error']}." for cell in failed]
    checks = check(results)
    if checks:
        parts += ["**Statements**:", checks_table(checks, "expected")]
    hardware, versions = results["hardware"], results["versions"]
    where = f"{hardware['gpu'] or hardware['cpu']}, torch {versions['torch']}"
    seconds = sum(cell["seconds"] for cell in results["cells"])
    parts.append(f"{len(results['cells'])} measurements, {seconds:.0f} s; {where}.")
    return "\n\n".join(parts) + "\n"


def fields(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: cell[field.name] for field in dataclasses.fields(Cell)}


def fitting_batches(results: Results) -> str:
    """Return the table of batches that fit 1.5B parameters onto cards, or nothing."""
    cells, model = results["cells"], "gpt2-xl"
    lines, again = [], False
    for name in CHOICES:
        line: list[object] = [optimizers.TITLES[name]]
        for room in CARDS.values():
            pair = [largest_batch(cells, model, name, room, option) for option in (False, True)]
            known = [count for count in pair if count is not None]
            again = again or len(known) == 2
            line.append(" / ".join("no" if count == 0 else str(count) for count in known) or "-")
        if any(entry != "-" for entry in line[1:]):
            lines.append(line)
    if not lines:
        return ""
    how = "keeping everything for the backward pass"
    how += " / computing the blocks again" if again else ""
    intro = (
        f"Sequences of 1,024 tokens per pass that fit XL onto a card, m = 1, {how}. From the "
        f"measurements above, with {RESERVED:g} GiB of the card left for others; 'no': not even "
        "one."
    )
    return f"{intro}\n\n{markdown(['', *CARDS], lines)}"


# The command


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the table, or show a saved one."""
    parser = argparse.ArgumentParser(
        "python -m recipes language memory", description="Peak memory by optimizer and size"
    )
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=best, help="default here: %(default)s")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument(
        "--models", nargs="+", choices=list(SIZES), default=list(BATCHES), metavar="MODEL"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/memory"), help="folder")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="start no measurement after this"
    )
    parser.add_argument("--show", type=Path, metavar="FILE.json", help="saved results: tabulate")
    args = parser.parse_args(argv)
    if args.show is not None:
        entries = {"config": dict, "versions": dict, "hardware": dict, "cells": list}
        try:
            results = read_saved("--show", args.show, "language memory", **entries)
        except ValueError as error:
            parser.error(str(error))
        path = args.show
    else:
        path = args.out / "language_memory.json"
        results = measure_all(args, path)
    page = path.with_suffix(".md")
    page.write_text(report(results), encoding="utf-8")
    print(page)


def measure_all(args: argparse.Namespace, path: Path) -> Results:
    """Measure all cells that are not in the file yet, and save after each."""
    device = torch.device(args.device)
    config = {"models": args.models, "compile": args.compile, "rounds": ROUNDS}
    results: Results = {
        "config": config,
        "versions": environment.versions("pytorch_optimizer"),
        "hardware": environment.hardware(args.device),
        "cells": [],
    }
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if all(before[key] == results[key] for key in ("config", "versions", "hardware")):
            results = before
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [fields(cell) for cell in results["cells"]]
    end = None if args.time_limit is None else time.monotonic() + args.time_limit
    for cell in plan(args.models):
        reason = optimizers.missing_requirement(CHOICES[cell.optimizer])
        if reason is not None:
            print_line(f"{cell.name}: left out, {reason}")
            continue
        if dataclasses.asdict(cell) in done or (end is not None and time.monotonic() > end):
            continue
        if not done or done[-1]["model"] != cell.model:
            torch.compiler.reset()  # what was compiled for another size is not needed any more
        line = measure(cell, device, args.compile)
        done.append(dataclasses.asdict(cell))
        results["cells"].append(line)
        path.write_text(json.dumps(results) + "\n", encoding="utf-8")
        print_line(f"{cell.name}: {describe(line)}")
    print(path)
    return results


def describe(line: Mapping[str, Any]) -> str:
    if line["error"]:
        return str(line["error"])
    state = f"state {line['state_bytes'] / MIB:,.0f} MiB"
    if line["pass_bytes"] is None:
        return state
    return f"peak {peak(line) / MIB:,.0f} MiB, {state}, {line['seconds']} s"
