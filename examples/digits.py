"""Train a small network on scikit-learn's digits with AdamW, SISA and NSISA, and compare them.

Everyone starts from the same weights and gets the same number of gradients, each of 64 samples.
AdamW has its usual learning rate, SISA and NSISA the library's defaults. "SISA, 4 parts" never sees
a shuffled batch: it takes turns between four parts of the data that share no digit, and moves the
weights once per round of four gradients.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchpisa
from torchpisa.data import Parts, RoundSampler

try:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name.partition('.')[0]}: pip install 'torchpisa[demo]'")

BATCH_SIZE = 64
POINTS = 100  # how often a run is measured


@dataclass
class Run:
    """One optimizer, how it reads the data, how it is drawn, and what came of it."""

    name: str
    parts: Parts
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    colour: str  # from Okabe and Ito's palette, safe for colour-blind readers
    line: str
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    state: float = 0.0  # bytes per parameter


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train and to test; the split is the same for every --seed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    # The 297 in between are left for those who tune something.
    return x[:1000], y[:1000], x[1297:], y[1297:]


def contestants(y: Tensor) -> list[Run]:
    everything = Parts.from_indices([range(len(y))])
    groups = [(0,), (1, 2), (3, 4, 5), (6, 7, 8, 9)]
    by_digit = Parts.from_indices(
        [torch.isin(y, torch.tensor(digits)).nonzero().flatten() for digits in groups]
    )
    # The paper's terms, with a sigma for parts that share no label.
    uneven = {"sigma": 2.0, "rho": 100.0, "batches": len(by_digit), "weights": by_digit.weights}
    return [
        Run("AdamW", everything, lambda p: torch.optim.AdamW(p, lr=1e-3), "#000000", "--"),
        Run("SISA", everything, lambda p: torchpisa.SISA(p), "#0072B2", "-"),
        Run("SISA, 4 parts", by_digit, lambda p: torchpisa.SISA(p, **uneven), "#56B4E9", "-."),
        Run("NSISA", everything, lambda p: torchpisa.NSISA(p), "#D55E00", "-"),
    ]


def train(run: Run, data: tuple[Tensor, ...], steps: int, seed: int, report: Callable) -> None:
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Linear(64, 128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.ReLU()),
        nn.Linear(128, 10),
    )
    opt = run.optimizer(model.parameters())

    @torch.no_grad()
    def measure(step: int) -> None:
        run.steps.append(step)
        # Of all training data: single batches are noisy, and those of the four parts differ.
        run.loss.append(F.cross_entropy(model(x), y).item())
        run.accuracy.append(100 * (model(x_test).argmax(1) == y_test).float().mean().item())
        report(completed=step, loss=run.loss[-1], accuracy=run.accuracy[-1])

    measure(0)
    # One batch from each part in turn; with everything in one part, ordinary shuffled batches.
    sampler = RoundSampler(run.parts, BATCH_SIZE, rounds=-(-steps // len(run.parts)), seed=seed)
    for step, index in enumerate(islice(sampler, steps), start=1):
        start = time.perf_counter()
        loss = F.cross_entropy(model(x[index]), y[index])
        loss.backward()
        opt.step()
        opt.zero_grad()
        run.seconds += time.perf_counter() - start
        if step % max(1, steps // POINTS) == 0 or step == steps:
            measure(step)
    run.state = bytes_per_parameter(opt)


def bytes_per_parameter(opt: torch.optim.Optimizer) -> float:
    if isinstance(opt, torchpisa.SISA | torchpisa.NSISA):
        return opt.memory().bytes_per_parameter
    tensors = [t for state in opt.state.values() for t in state.values()]
    elements = sum(param.numel() for group in opt.param_groups for param in group["params"])
    return sum(t.numel() * t.element_size() for t in tensors) / elements


def table(runs: list[Run]) -> Table:
    result = Table(caption="One seed, 500 test images: differences of a point are noise.")
    result.add_column("optimizer")
    for title in ("training\nloss", "test\naccuracy", "best test\naccuracy", "seconds"):
        result.add_column(title, justify="right")
    result.add_column("state bytes\nper parameter", justify="right")
    for run in runs:
        accuracies = f"{run.accuracy[-1]:.1f} %", f"{max(run.accuracy):.1f} %"
        costs = f"{run.seconds:.1f}", f"{run.state:.1f}"
        result.add_row(run.name, f"{run.loss[-1]:.1e}", *accuracies, *costs)
    return result


def smooth(values: list[float], reach: int = 7) -> list[float]:
    """Running median: a mean of losses would show little but the spikes."""
    reaches = [min(reach, i) for i in range(len(values))]
    return [median(values[i - r : i + r + 1]) for i, r in enumerate(reaches)]


def draw(runs: list[Run], path: Path) -> None:
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        for axes, values in ((left, run.loss), (right, run.accuracy)):
            axes.plot(run.steps, values, color=run.colour, linewidth=0.8, alpha=0.35)
            axes.plot(run.steps, smooth(values), run.line, color=run.colour, label=run.name)
    left.set(yscale="log", ylabel="cross-entropy, all training data")
    left.set_title("Training loss (thin: as measured, thick: running median)", fontsize=10)
    right.set(ylabel="correct (%)")
    right.set_title("Test accuracy (likewise)", fontsize=10)
    # The climb from 10 % would squeeze the part where the curves differ.
    right.set_ylim(max(0, min(run.accuracy[-1] for run in runs) - 10), 100)
    for axes in (left, right):
        axes.set_xlabel(f"step (one gradient of {BATCH_SIZE} samples)")
        axes.set_xlim(0, runs[0].steps[-1])
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    names = left.lines[1::2]  # the thick ones
    figure.legend(handles=names, loc="outside upper center", ncols=len(runs), frameon=False)
    figure.savefig(path, dpi=150)


def whole_number(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
        return int(text)

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=whole_number(1), default=2000, help="default: 2000")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="default: digits.png")
    options = parser.parse_args()
    # Before the training, not after it.
    if options.out.suffix not in {".png", ".pdf", ".svg"} or not options.out.parent.is_dir():
        parser.error(f"--out must be a .png, .pdf or .svg in an existing folder: {options.out}")

    torch.set_num_threads(1)  # the matrices are too small for more to help
    data = load()
    runs = contestants(data[1])
    console = Console()
    numbers = "loss {task.fields[loss]:.1e}  test {task.fields[accuracy]:5.1f} %"
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()
    with Progress(*columns, TextColumn(numbers), console=console) as progress:
        for run in runs:
            bar = progress.add_task(run.name, total=options.steps, loss=0, accuracy=0)
            train(run, data, options.steps, options.seed, partial(progress.update, bar))
    console.print(table(runs))
    draw(runs, options.out)
    console.print(f"picture: {options.out.resolve()}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
