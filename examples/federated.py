"""Train one network on ten clients that hold 1, 2 or 3 of scikit-learn's digits each.

FedAvg, FedProx, FedNova and Scaffold run an epoch of SGD on every client between two exchanges;
SISA and MISA take one gradient of all the client's data. Everyone sees every sample once per round.
MISA has its defaults. The settings of the others were chosen on the 297 digits that are neither
trained nor tested on here, SISA's from many more trials than the others'; these were not kept.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from torchpisa.federated import (
    MISA,
    SISA,
    Algorithm,
    Epochs,
    FedAvg,
    FedNova,
    FedProx,
    Scaffold,
    Simulation,
    accuracy,
)
from torchpisa.federated.partition import by_label, label_counts

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name.partition('.')[0]}: pip install 'torchpisa[demo]'")

CLIENTS, LABELS = 10, (1, 2, 3)
POINTS = 40  # how often a run is measured
EPOCH = Epochs(epochs=1, batch_size=10)
ALGORITHMS: dict[str, tuple[Algorithm, str]] = {  # colours: Okabe and Ito, for all eyes
    "FedAvg": (FedAvg(lr=0.5, local=EPOCH), "#000000"),
    "FedProx": (FedProx(lr=0.5, mu=0.1, local=EPOCH), "#009E73"),
    "FedNova": (FedNova(lr=0.5, local=EPOCH), "#CC79A7"),
    "Scaffold": (Scaffold(lr=0.5, lr_decay=0.98, local=EPOCH), "#D55E00"),
    "SISA": (SISA(sigma=0.3, rho=50.0, beta=0.99, gamma=0.985), "#0072B2"),
    "MISA": (MISA(), "#56B4E9"),
}

Split = tuple[Tensor, Tensor]


@dataclass
class Run:
    """An algorithm on clients with so many labels each, and what came of it."""

    name: str
    labels: int
    rows: list[dict[str, float]] = field(default_factory=list)

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


def load() -> tuple[Split, Split]:
    """Training and test data, the same for every --seed."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    # The 297 in between are left for those who tune something.
    return (x[:1000], y[:1000]), (x[1297:], y[1297:])


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train(
    run: Run, train_set: Split, test_set: Split, rounds: int, seed: int, report: Callable
) -> None:
    x, y = train_set
    parts = by_label(y, clients=CLIENTS, labels_per_client=run.labels, seed=seed)
    clients = [(x[part], y[part]) for part in parts.indices]
    simulation = Simulation(network(seed), clients, ALGORITHMS[run.name][0], seed=seed)
    measure = accuracy(*test_set)

    def evaluate(model: nn.Module) -> dict[str, float]:
        numbers = measure(model)
        report(completed=simulation.iteration, accuracy=numbers["accuracy"])
        return numbers

    every = max(1, rounds // POINTS)
    run.rows = simulation.run(rounds, evaluate=evaluate, every=every, progress=False)


def table(runs: list[Run]) -> Table:
    result = Table(
        title="Test accuracy (%) in the last round, in brackets in the best one",
        caption="One seed, 500 test images: differences of a point are noise. Local steps and MB "
        "sent are of all clients in one run, seconds of the three runs.",
    )
    result.add_column("")
    for labels in LABELS:
        result.add_column(plural(labels), justify="right")
    for title in ("steps", "MB", "seconds"):
        result.add_column(title, justify="right")
    for name in ALGORITHMS:
        own = [run for run in runs if run.name == name]
        scores = [(run.column("accuracy")[-1], max(run.column("accuracy"))) for run in own]
        last = own[0].rows[-1]
        result.add_row(
            name,
            *(f"{end:.1f} ({best:.1f})" for end, best in scores),
            f"{last['gradients']:,.0f}",
            f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.0f}",
            f"{sum(run.rows[-1]['seconds'] for run in own):.1f}",
        )
    return result


def plural(labels: int) -> str:
    return f"{labels} label{'s'[: labels > 1]}"


def draw(runs: list[Run], labels: Tensor, seed: int, path: Path) -> None:
    """Above who holds what, below how accuracy grows."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    above, below = figure.subplots(2, 3, height_ratios=(1, 2.4), sharey="row")
    for axes, count in zip(above, LABELS, strict=True):
        parts = by_label(labels, clients=CLIENTS, labels_per_client=count, seed=seed)
        holders(axes, label_counts(parts, labels))
        axes.set_title(f"{plural(count)} per client", fontsize=11)
    for axes, count in zip(below, LABELS, strict=True):
        for run in (run for run in runs if run.labels == count):
            colour, thick = ALGORITHMS[run.name][1], run.name in ("SISA", "MISA")
            line = (run.column("round"), run.column("accuracy"))
            axes.plot(*line, color=colour, label=run.name, linewidth=2.2 if thick else 1.2)
        axes.set(xlabel="rounds", ylim=(60, 100), xlim=(0, runs[0].rows[-1]["round"]))
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    above[0].set_ylabel("label")
    below[0].set_ylabel("test accuracy (%)")
    lines = below[0].lines
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.savefig(path, dpi=150)


def holders(axes: Axes, counts: Tensor) -> None:
    """A disc for every label of every client, as large as its number of samples."""
    clients, labels = counts.nonzero(as_tuple=True)
    sizes = counts[clients, labels] / counts.max()
    axes.scatter(clients, labels, s=70 * sizes, color="#0072B2", linewidths=0)
    axes.set(xlabel="client", xticks=range(CLIENTS), yticks=range(0, 10, 3), ylim=(-1, 10))
    axes.spines[["top", "right"]].set_visible(False)


def whole_number(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
        return int(text)

    return parse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=whole_number(1), default=200, help="default: 200")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="default: 0")
    default = Path("federated.png")
    parser.add_argument("--out", type=Path, default=default, help=f"default: {default}")
    options = parser.parse_args()
    # Before the training, not after it.
    if options.out.suffix not in {".png", ".pdf", ".svg"} or not options.out.parent.is_dir():
        parser.error(f"--out must be a .png, .pdf or .svg in an existing folder: {options.out}")

    torch.set_num_threads(1)  # the matrices are too small for more to help
    train_set, test_set = load()
    runs = [Run(name, labels) for labels in LABELS for name in ALGORITHMS]
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn()
    number = TextColumn("test {task.fields[accuracy]:5.1f} %")
    with Progress(*columns, number, console=console) as progress:
        for run in runs:
            title = f"{plural(run.labels):8}  {run.name:8}"
            bar = progress.add_task(title, total=options.rounds, accuracy=0)

            def report(bar: int = bar, **values: float) -> None:
                progress.update(bar, **values)

            train(run, train_set, test_set, options.rounds, options.seed, report)
    console.print(table(runs))
    draw(runs, train_set[1], options.seed, options.out)
    console.print(f"picture: {options.out.resolve()}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    main()
