"""Two demonstrations: an optimizer swapped in one line, and clients with one digit each.

Part one trains a small transformer on the characters of Python's own manual with AdamW, Muon (with
AdamW for what is not a hidden matrix) and MISA: with default settings, and with the best of six
learning rates. Part two trains a network on ten clients, each with one of scikit-learn's digits.

Rates and other settings were chosen by `--tune`, on data and with seeds that are not used here.
"""

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchpisa
from torchpisa.federated import (
    MISA,
    SISA,
    Algorithm,
    Epochs,
    FedAvg,
    Minibatches,
    Scaffold,
    Simulation,
    accuracy,
)
from torchpisa.federated.partition import by_label

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"The demo needs {error.name.partition('.')[0]}: pip install 'torchpisa[demo]'")

STEPS, ROUNDS = 300, 60
TARGET = 90  # per cent, of the accuracy that rounds are counted to
NEVER = 10**6  # rounds; JSON has no infinity
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
SEEDS, TUNING_SEED = (0, 1, 2), 7
# Okabe and Ito's colours, for all eyes, readable on light and dark.
COLOURS = {
    **{"AdamW": "#999999", "Muon + AdamW": "#E69F00", "MISA": "#0072B2"},
    **{"FedAvg": "#999999", "FedAvg, 2 steps": "#CC79A7", "Scaffold": "#D55E00", "SISA": "#009E73"},
}
COLOURS["MISA, 1 step"] = COLOURS["MISA"]
DARK = dict.fromkeys(("MISA", "MISA, 1 step"), "#56B4E9")


@dataclass(frozen=True)
class Task:
    """A run.

    Attributes:
        part: "text" or "clients".
        name: the name of the optimizer or algorithm.
        settings: its arguments.
        kind: "default", "best", or "trial" when tuning.
        seed: seed of the weights and of the order of the data.
    """

    part: str
    name: str
    settings: dict[str, float] = field(default_factory=dict)
    kind: str = "default"
    seed: int = 0


@dataclass
class Run:
    """A task and its curve: `x` is steps or rounds, `y` loss or accuracy in per cent."""

    task: Task
    x: list[float]
    y: list[float]
    samples: list[float]
    seconds: float


# Part one: characters


CONTEXT, BATCH, WIDTH = 64, 16, 64


@cache
def text() -> tuple[Tensor, int]:
    """Python's manual, as its help() has it, in numbers; and how many there are."""
    from pydoc_data.topics import topics

    whole = "\n".join(topics[name] for name in sorted(topics))
    characters = {each: number for number, each in enumerate(sorted(set(whole)))}
    return torch.tensor([characters[each] for each in whole]), len(characters)


def windows(first: float, count: int = 128) -> Tensor:
    """Characters that nobody trains on, from some point of the text on."""
    ids, _ = text()
    start = int(first * len(ids))
    return torch.stack([ids[start + i * CONTEXT :][: CONTEXT + 1] for i in range(count)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for weight in (self.token.weight, self.position.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def optimizers(task: Task, model: Transformer) -> list[torch.optim.Optimizer]:
    if task.name == "AdamW":
        return [torch.optim.AdamW(model.parameters(), **task.settings)]
    if task.name == "MISA":
        return [torchpisa.create("misa", model, **task.settings)]
    hidden = [param for param in model.blocks.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if all(param is not other for other in hidden)]
    muon = torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **task.settings)
    return [muon, torch.optim.AdamW(rest, **task.settings)]


def train_text(task: Task, steps: int) -> Run:
    ids, characters = text()
    training, held_out = ids[: int(0.8 * len(ids))], windows(0.8 if task.kind == "trial" else 0.9)
    torch.manual_seed(task.seed)
    model = Transformer(characters)
    opts = optimizers(task, model)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps) for opt in opts]
    order = torch.Generator().manual_seed(task.seed)
    run = Run(task, [], [], [], 0.0)
    for step in range(1, steps + 1):
        start = time.perf_counter()
        first = torch.randint(0, len(training) - CONTEXT, (BATCH,), generator=order)
        batch = torch.stack([training[i : i + CONTEXT + 1] for i in first.tolist()])
        model.zero_grad()
        model.loss(batch).backward()
        for each in (*opts, *schedules):
            each.step()
        run.seconds += time.perf_counter() - start
        if step % max(1, steps // 30) == 0 or step == steps:
            with torch.no_grad():
                run.y.append(model.loss(held_out).item())
            run.x.append(step)
            run.samples.append(step * BATCH)
    return run


# Part two: clients


CLIENTS = 10
EPOCH, TWO = Epochs(epochs=1, batch_size=10), Minibatches(steps=2, batch_size=10)
ONE = Minibatches(steps=1, batch_size=20)  # as many samples as in two steps of ten
ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "FedAvg": lambda **settings: FedAvg(local=EPOCH, **settings),
    "FedAvg, 2 steps": lambda **settings: FedAvg(local=TWO, **settings),
    "Scaffold": lambda **settings: Scaffold(local=EPOCH, **settings),
    "SISA": lambda **settings: SISA(**settings),
    "MISA": lambda **settings: MISA(**settings),
    "MISA, 1 step": lambda **settings: MISA(local=ONE, **settings),
}
GRIDS: dict[str, list[dict[str, float]]] = {
    **{name: [{"lr": lr} for lr in (0.1, 0.2, 0.5, 1.0)] for name in list(ALGORITHMS)[:2]},
    "Scaffold": [
        {"lr": lr, "lr_decay": decay} for lr in (0.1, 0.2, 0.5, 1.0) for decay in (1.0, 0.98)
    ],
    "SISA": [
        {"sigma": sigma, "rho": rho} for sigma in (0.1, 0.3, 1.0) for rho in (3.0, 10.0, 50.0)
    ],
}


@cache
def digits(held_out: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train on, and to measure by: the test set, or one to tune on."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    part = slice(1000, 1297) if held_out == "tuning" else slice(1297, None)
    return x[:1000], y[:1000], x[part], y[part]


def train_clients(task: Task, rounds: int) -> Run:
    x, y, *held_out = digits("tuning" if task.kind == "trial" else "test")
    parts = by_label(y, clients=CLIENTS, labels_per_client=1, seed=task.seed)
    clients = [(x[part], y[part]) for part in parts.indices]
    torch.manual_seed(task.seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    algorithm = ALGORITHMS[task.name](**task.settings)
    simulation = Simulation(model, clients, algorithm, seed=task.seed)
    rows = simulation.run(rounds, evaluate=accuracy(*held_out), progress=False)
    columns = ([row[name] for row in rows] for name in ("round", "accuracy", "samples"))
    return Run(task, *columns, rows[-1]["seconds"])


def reached(run: Run, of: Sequence[float]) -> float | None:
    """Rounds, or samples, until the target was met for the first time."""
    return next((x for x, y in zip(of, run.y, strict=True) if y >= TARGET), None)


# Both parts


def work(task: Task, steps: int, rounds: int) -> Run:
    torch.set_num_threads(1)  # two processes on two cores
    return train_text(task, steps) if task.part == "text" else train_clients(task, rounds)


def do(tasks: list[Task], steps: int, rounds: int, console: Console) -> list[Run]:
    """Run all tasks, two at a time, and return them in their order."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(work, task, steps, rounds): task for task in tasks}
        done = track(as_completed(waiting), "training", total=len(tasks), console=console)
        found = {id(waiting[each]): each.result() for each in done}
    return [found[id(task)] for task in tasks]


def has_muon() -> bool:
    return hasattr(torch.optim, "Muon")  # since torch 2.9


def trials() -> list[Task]:
    names = ["AdamW", *(["Muon + AdamW"] if has_muon() else []), "MISA"]
    made = [Task("text", name, {"lr": lr}, "trial", TUNING_SEED) for name in names for lr in RATES]
    for name, grid in GRIDS.items():
        made += [Task("clients", name, settings, "trial", TUNING_SEED) for settings in grid]
    return made


def best(runs: list[Run]) -> dict[str, dict[str, float]]:
    """Return the settings of the best trial, by part and name."""
    chosen: dict[str, Run] = {}
    for run in runs:
        key = f"{run.task.part}/{run.task.name}"
        if key not in chosen or score(run) < score(chosen[key]):
            chosen[key] = run
    return {key: run.task.settings for key, run in chosen.items()}


def score(run: Run) -> tuple[float, float]:
    if run.task.part == "text":
        return run.y[-1], 0.0
    return reached(run, run.x) or NEVER, -run.y[-1]


# What `--tune` chose.
BEST: dict[str, dict[str, float]] = {
    "text/AdamW": {"lr": 4e-3},
    "text/Muon + AdamW": {"lr": 1.6e-2},
    "text/MISA": {"lr": 1.6e-2},
    "clients/FedAvg": {"lr": 0.5},
    "clients/FedAvg, 2 steps": {"lr": 0.5},
    "clients/Scaffold": {"lr": 0.2, "lr_decay": 0.98},
    "clients/SISA": {"sigma": 0.3, "rho": 50.0},
}


def tasks() -> list[Task]:
    names = ["AdamW", *(["Muon + AdamW"] if has_muon() else []), "MISA"]
    made = [Task("text", name) for name in names]
    made += [Task("text", name, BEST[f"text/{name}"], "best") for name in names]
    for name in ALGORITHMS:
        settings = BEST.get(f"clients/{name}")
        kind = "default" if settings is None else "best"
        made += [Task("clients", name, settings or {}, kind, seed) for seed in SEEDS]
    return made


# Tables


def text_rows(runs: list[Run]) -> list[list[str]]:
    found = {(run.task.name, run.task.kind): run for run in runs if run.task.part == "text"}
    return [
        [
            name,
            f"{found[name, 'default'].y[-1]:.2f}",
            f"{found[name, 'best'].y[-1]:.2f}",
            f"{found[name, 'best'].task.settings['lr']:g}",
        ]
        for name in dict.fromkeys(name for name, _ in found)
    ]


def client_rows(runs: list[Run]) -> list[list[str]]:
    made = []
    for name in ALGORITHMS:
        own = [run for run in runs if run.task.part == "clients" and run.task.name == name]
        rounds = [reached(run, run.x) for run in own]
        samples = [reached(run, run.samples) for run in own]
        last = [run.y[-1] for run in own]
        made.append(
            [
                name,
                middle(rounds),
                middle(samples),
                f"{statistics.mean(last):.1f}",
                f"{own[0].samples[-1] / own[0].x[-1]:,.0f}",
            ]
        )
    return made


def middle(values: Sequence[float | None]) -> str:
    """The median over seeds; never, if most of them never arrived."""
    numbers = sorted(NEVER if value is None else value for value in values)
    value = numbers[len(numbers) // 2]
    return "never" if value == NEVER else f"{value:,.0f}"


TEXT_HEAD = ["", "loss, default settings", "loss, best of six rates", "that rate"]
CLIENT_HEAD = [
    "",
    f"rounds to {TARGET} %",
    f"samples to {TARGET} %",
    "last round, %",
    "samples a round",
]


def table(title: str, head: list[str], rows: list[list[str]], caption: str) -> Table:
    made = Table(title=title, caption=caption)
    for number, name in enumerate(head):
        made.add_column(name, justify="right" if number else "left")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


# The picture


def draw(runs: list[Run], path: Path, dark: bool = False) -> None:
    """Loss by steps; accuracy by rounds; accuracy by local work."""
    ink, faint = ("#e6e6e6", "#4d4d4d") if dark else ("#222222", "#dddddd")
    figure = Figure(figsize=(12, 4), layout="constrained")
    left, centre, right = figure.subplots(1, 3)
    for run in runs:
        if run.task.part == "text":
            style = {"linestyle": ":"} if run.task.kind == "default" else {}
            name = run.task.name if run.task.kind == "best" else None
            left.plot(run.x, run.y, **{**look(run.task.name, dark), **style}, label=name)
    for name in ALGORITHMS:
        own = [run for run in runs if run.task.part == "clients" and run.task.name == name]
        mean = [statistics.mean(values) for values in zip(*(run.y for run in own), strict=True)]
        centre.plot(own[0].x, mean, **look(name, dark), label=name)
        right.plot(own[0].samples, mean, **look(name, dark))
    titles = {
        left: ("A small transformer", "steps", "validation loss"),
        centre: ("Ten clients, one digit each: by round", "rounds", "test accuracy (%)"),
        right: ("The same: by local work", "sample gradients", "test accuracy (%)"),
    }
    for axes, (title, below, beside) in titles.items():
        axes.set_title(title, fontsize=11, color=ink, loc="left", weight="bold")
        axes.set_xlabel(below, color=ink)
        axes.set_ylabel(beside, color=ink)
        finish(axes, ink, faint)
    left.set_ylim(top=3.4)
    for axes in (centre, right):
        axes.set_ylim(40, 100)
        axes.axhline(TARGET, color=faint, linewidth=1.2, zorder=0)
    right.set_xscale("log")
    legend = {"frameon": False, "fontsize": 9, "labelcolor": ink}
    left.legend(**legend, title="dotted: default rate\nsolid: best of six")
    left.get_legend().get_title().set(color=ink, fontsize=9)
    centre.legend(**legend, loc="lower right")
    figure.savefig(path, dpi=150, transparent=dark)


def look(name: str, dark: bool) -> dict[str, Any]:
    colour = DARK.get(name, COLOURS[name]) if dark else COLOURS[name]
    style = "--" if name == "MISA, 1 step" else "-"
    return {"color": colour, "linestyle": style, "linewidth": 2.6 if "MISA" in name else 1.6}


def finish(axes: Axes, ink: str, faint: str) -> None:
    axes.grid(color=faint, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(faint)


# The command


def record(runs: list[Run], tuning: list[Run], seconds: float) -> dict[str, Any]:
    """Return everything that was found, and on what."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchpisa": torchpisa.__version__,
        "machine": f"{platform.machine()}, 2 processes of one thread",
        "seconds": round(seconds, 1),
        "runs": [asdict(run) for run in runs],
        "trials": [
            {"task": asdict(run.task), "score": list(score(run)), "last": run.y[-1]}
            for run in tuning
        ],
    }


def read(path: Path) -> list[Run]:
    """Return the runs of a file that `--save` has written."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    return [Run(**{**run, "task": Task(**run["task"])}) for run in saved["runs"]]


def whole_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) < 10**6:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in (("steps", STEPS), ("rounds", ROUNDS)):
        parser.add_argument(f"--{name}", type=whole_number, default=value, help=f"default: {value}")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="default: demo.png")
    parser.add_argument("--dark", type=Path, help="a picture for dark pages, too")
    parser.add_argument("--save", type=Path, help="write all numbers to a JSON file")
    parser.add_argument("--tune", action="store_true", help="choose the settings anew (minutes)")
    options = parser.parse_args()
    for name, endings in (("out", PICTURES), ("dark", PICTURES), ("save", {".json"})):
        path = getattr(options, name)  # before the training, not after it
        if path is not None and (path.suffix not in endings or not path.parent.is_dir()):
            kinds = ", ".join(sorted(endings))
            parser.error(f"--{name} must be a {kinds} in an existing folder: {path}")

    console = Console()
    lengths = options.steps, options.rounds
    tuning: list[Run] = []
    if options.tune:
        tuning = do(trials(), *lengths, console)
        BEST.update(best(tuning))
        console.print(BEST)
    start = time.perf_counter()
    runs = do(tasks(), *lengths, console)
    seconds = time.perf_counter() - start
    console.print(
        table(
            *("A small transformer, validation loss (lower is better)", TEXT_HEAD, text_rows(runs)),
            caption=f"{options.steps} steps with a cosine schedule, the same batches for all.",
        ),
        table(
            *("Ten clients, one digit each", CLIENT_HEAD, client_rows(runs)),
            caption=f"{options.rounds} rounds, {len(SEEDS)} seeds: median of rounds and samples, "
            "mean accuracy on 500 images.",
        ),
    )
    draw(runs, options.out)
    if options.dark is not None:
        draw(runs, options.dark, dark=True)
    if options.save is not None:
        text = json.dumps(record(runs, tuning, seconds), indent=1)
        options.save.write_text(text + "\n", encoding="utf-8")
    console.print(f"{seconds:.0f} s; picture: {options.out.resolve()}", soft_wrap=True)


PICTURES = {".png", ".pdf", ".svg"}

if __name__ == "__main__":
    main()
