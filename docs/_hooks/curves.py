"""MkDocs hook: pictures of results become curves that a reader can choose from.

Where a page shows `results/NAME.svg`, for the NAMEs below, the site has the curves of
`results/NAME.json` instead: a choice of panels, a button per optimizer, values under the pointer,
and what was not run. The data is part of the page and `js/curves.js` draws it, so nothing is
fetched. Elsewhere, and where scripts are off, the picture itself is shown.
"""

import html as html_text
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = re.compile(
    r'<p><img alt="(?P<alt>[^"]*)" src="(?:\.\./)*(?:results/)?(?P<name>\w+)\.svg" ?/></p>'
)
NAMES = {
    "adabelief": "AdaBelief",
    "adabound": "AdaBound",
    "adam": "Adam",
    "adamw": "AdamW",
    "adamw_published": "AdamW, published setting",
    "fedavg": "FedAvg",
    "fednova": "FedNova",
    "fedprox": "FedProx",
    "fedsgd": "FedSGD",
    "lamb": "LAMB",
    "misa": "MISA",
    "misa_adam_rate": "MISA, Adam's rate",
    "misa_all": "MISA, all stages",
    "misa_both_sides": "MISA, eigenbasis of both sides",
    "misa_both_sides_lr3.6": "MISA, eigenbasis of both sides, lr 3.6e-3",
    "misa_one_side": "MISA, eigenbasis of one side",
    "misa_one_side_lr3.6": "MISA, eigenbasis of one side, lr 3.6e-3",
    "misa_whiten": "MISA, whitened",
    "misa_whiten_half": "MISA, whitened by half powers",
    "msvag": "MSVAG",
    "muon": "Muon + AdamW",
    "muon-rms": "Muon + AdamW, RMS-matched",
    "muon_rest_misa": "Muon, the rest by MISA's rule",
    "nadam": "NAdam",
    "normuon": "NorMuon",
    "normuon_lr3": "NorMuon, lr 3e-3",
    "nsisa": "NSISA",
    "padam": "PAdam",
    "radam": "RAdam",
    "rmsprop": "RMSProp",
    "scaffold": "Scaffold",
    "sgd": "SGD",
    "sisa": "SISA",
    "sisa_defaults": "SISA, defaults",
    "sisa_lr": "SISA, Adam's rate",
    "sisa_row": "SISA, the paper's row",
    "sisa_row_scheme2": "SISA, the paper's row, Scheme II",
    "sisa_steps": "SISA, published steps",
    "sisa_script": "SISA, the published script's scale",
    "sisa_test": "SISA, row for testing",
    "soap": "SOAP",
    "soap_muon": "SOAP-Muon",
    "soap_muon_lr3": "SOAP-Muon, lr 3e-3",
    "yogi": "Yogi",
    # Data sets and models
    "124m": "GPT-2, 124M",
    "335m": "GPT-2, 335M",
    "adult": "Adult",
    "ant_ppo": "Ant, PPO",
    "cifar10": "CIFAR-10",
    "densenet121": "DenseNet-121",
    "double_pendulum_a2c": "InvertedDoublePendulum, A2C",
    "fashion_mnist": "Fashion-MNIST",
    "half_cheetah_a2c": "HalfCheetah, A2C",
    "humanoid_ppo": "Humanoid, PPO",
    "mnist": "MNIST",
    "resnet34": "ResNet-34",
    "vgg11": "VGG-11",
    "wgan": "WGAN",
    "wgan_gp": "WGAN-GP",
}
STEPS = "steps of 65,536 tokens"
ALSO = {"defaults", "language_stages"}  # pictures of something else, which stay above the curves
Run = dict[str, Any]


class Column(NamedTuple):
    """What is drawn along a vertical axis."""

    name: str
    label: str
    scale: float = 1.0
    log: bool = False
    percent: bool = False  # logarithmic in what is missing to 100


@dataclass
class Line:
    """The runs of one optimizer, which differ by their seed."""

    xs: list[list[float]] = field(default_factory=list)
    ys: list[list[float]] = field(default_factory=list)

    def add(self, x: Iterable[float], y: Iterable[float | None]) -> None:
        """Add a run, without the points at which nothing was measured."""
        pairs = [(a, b) for a, b in zip(x, y, strict=False) if b is not None and math.isfinite(b)]
        if pairs:
            self.xs.append([a for a, _ in pairs])
            self.ys.append([b for _, b in pairs])

    def mean(self) -> dict[str, Any]:
        """Return the mean over runs, as far as all of them go."""
        length = min(map(len, self.ys))
        cut = [y[:length] for y in self.ys]
        mean = [sum(values) / len(values) for values in zip(*cut, strict=True)]
        return {
            "x": [_short(x) for x in self.xs[0][:length]],
            "y": [_short(y) for y in mean],
            "runs": len(self.ys),
        }


@dataclass
class Panel:
    """Curves that are drawn together."""

    x: str
    y: str
    log: bool = False
    percent: bool = False
    lines: dict[str, Line] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)  # less those that have a line

    def line(self, name: str) -> Line:
        """Return the line of an optimizer, which may be new."""
        return self.lines.setdefault(name, Line())


Panels = dict[str, Panel]


def on_page_content(html: str, **_: Any) -> str:
    """Put curves in the place of a page's pictures."""

    def replace(match: re.Match[str]) -> str:
        if match["name"] not in SOURCES:
            return match[0]
        return figure(match["name"], match["alt"], match[0])

    return PICTURE.sub(replace, html)


def figure(name: str, alt: str, picture: str) -> str:
    """Return the curves of a file of results as HTML.

    Args:
        name: of the file, without its ending.
        alt: says in words what is to be seen.
        picture: what is shown where scripts are off.
    """
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    panels = SOURCES[name](results)
    data = [
        {
            "title": title,
            "x": panel.x,
            "y": panel.y,
            "log": panel.log,
            "percent": panel.percent,
            "lines": [{"name": each, **line.mean()} for each, line in panel.lines.items()],
            "missing": sorted(panel.missing - set(panel.lines)),
        }
        for title, panel in panels.items()
    ]
    # "</" would end the script.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    kept, hidden = (picture, "") if name in ALSO else ("", f"<noscript>{picture}</noscript>")
    return (
        f'{kept}<figure class="curves" aria-label="{html_text.escape(html_text.unescape(alt))}">'
        f'<script type="application/json">{text}</script>'
        f"{hidden}</figure>"
    )


def _short(value: float) -> float:
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _name(key: str) -> str:
    """Return what a page calls an optimizer or a model, with the setting that its key ends with."""
    if key in NAMES:
        return NAMES[key]
    if key.endswith("_decay"):
        return f"{_name(key.removesuffix('_decay'))}, with decay"
    name, _, lr = key.partition("_lr")
    if not lr:
        return key
    mantissa, exponent = f"{float(lr):e}".split("e")
    return f"{_name(name)}, lr {float(mantissa):g}e{int(exponent)}"


def _recipe(
    x: tuple[str, str], ys: list[Column], panel: Callable[[Run], str]
) -> Callable[[Run], Panels]:
    """Return how to read the file of a recipe whose runs have a `choice`.

    Args:
        x: column of the horizontal axis, and what it is called.
        ys: columns that have panels of their own.
        panel: what runs with these settings are of, as their identifiers begin.
    """

    def read(results: Run) -> Panels:
        groups: dict[str, dict[str, list[Run]]] = {}
        for run in results["runs"].values():
            label = run["settings"]["choice"]["label"]
            groups.setdefault(panel(run["settings"]), {}).setdefault(label, []).append(run)
        everyone = {label for runs in groups.values() for label in runs}
        for identifier in results["missing"]:
            for key in sorted((*groups, *NAMES), key=len, reverse=True):
                if identifier.startswith(f"{key}_"):
                    rest = identifier.removeprefix(f"{key}_")
                    everyone.add(re.sub(r"(_e\d+)?_seed\d+$", "", rest))
                    groups.setdefault(key, {})
                    break
        panels: Panels = {}
        for key, runs in groups.items():
            for column in ys:
                title = _name(key) + (f", {column.label}" if len(ys) > 1 else "")
                at = panels[title] = Panel(x[1], column.label, column.log, column.percent)
                at.missing = set(map(_name, everyone))
                for label, seeds in runs.items():
                    for run in seeds:
                        values = [None if y is None else column.scale * y for y in run[column.name]]
                        at.line(_name(label)).add(run[x[0]], values)
        return panels

    return read


def _demo(results: Run) -> Panels:
    panels = {
        "A small transformer": Panel("steps", "validation loss"),
        "Ten clients with one digit each, by rounds": Panel("rounds", "test accuracy (%)"),
        "The same clients, by local work": Panel("sample gradients", "test accuracy (%)"),
    }
    text, rounds, work = panels.values()
    for run in sorted(results["runs"], key=lambda run: run["task"]["kind"] == "default"):
        task = run["task"]
        if task["part"] == "text":
            text.line(f"{task['name']}, {task['kind']}").add(run["x"], run["y"])
        else:
            rounds.line(task["name"]).add(run["x"], run["y"])
            work.line(task["name"]).add(run["samples"], run["y"])
    for panel in (rounds, work):
        panel.missing = {"FedProx", "FedNova"}  # they are in the paper's table
    return panels


def _heterogeneity(results: Run) -> Panels:
    cells: dict[tuple[str, int], list[Run]] = {}
    for run in results["runs"].values():
        settings = run["settings"]
        cells.setdefault((settings["dataset"], settings["labels"]), []).append(run)
    everyone = {_name(run["settings"]["algorithm"]) for runs in cells.values() for run in runs}
    panels: Panels = {}
    for (dataset, labels), runs in cells.items():
        rounds = Panel("rounds", "test accuracy (%)", missing=set(everyone))
        work = Panel("sample gradients of all clients", "test accuracy (%)", missing=set(everyone))
        for run in runs:
            name = _name(run["settings"]["algorithm"])
            per_round = run["samples"] / run["round"][-1]
            rounds.line(name).add(run["round"], run["accuracy"])
            work.line(name).add([per_round * at for at in run["round"]], run["accuracy"])
        title = f"{_name(dataset)}, {labels} label{'s' * (labels > 1)} per client"
        panels |= {f"{title}, by rounds": rounds, f"{title}, by local work": work}
    return panels


def _trained(run: Run, column: str, first: int) -> tuple[list[float], list[float | None]]:
    """Steps and losses from some step on: the untrained model's would fill the picture."""
    points = zip(run["step"], run[column], strict=True)
    chosen = [(step, loss) for step, loss in points if step >= first]
    return [step for step, _ in chosen], [loss for _, loss in chosen]


def _language(results: Run) -> Panels:
    """The best trial of each optimizer, and all trials of each."""
    runs: dict[str, list[Run]] = {}
    for run in results["runs"].values():
        runs.setdefault(_name(run["settings"]["choice"]["name"]), []).append(run)
    best = Panel(STEPS, "validation loss")
    panels = {"The best trial of each optimizer": best}
    for name, trials in runs.items():
        lowest = min(trials, key=lambda run: run["last"] or math.inf)
        best.line(name).add(*_trained(lowest, "val_loss", 1))
        panel = panels[f"All trials of {name}"] = Panel(best.x, best.y)
        for run in trials:
            settings = run["settings"]
            label = settings["label"] + (f", m {m}" if (m := settings["batches"]) > 1 else "")
            panel.line(label.replace("_", " ")).add(*_trained(run, "val_loss", 1))
    return panels


def _language_stages(results: Run) -> Panels:
    labels = {run["settings"]["label"] for run in results["runs"].values()}
    labels |= {re.sub(r"_m\d+_seed\d+$", "", identifier) for identifier in results["missing"]}
    panels = {
        "Validation loss, second half": Panel(STEPS, "validation loss"),
        "Training loss": Panel(STEPS, "training loss"),
    }
    validation, training = panels.values()
    for run in results["runs"].values():
        name = _name(run["settings"]["label"])
        validation.line(name).add(*_trained(run, "val_loss", run["step"][-1] // 2))
        training.line(name).add(*_trained(run, "loss", 50))
    for panel in panels.values():
        panel.missing = set(map(_name, labels))
    return panels


def _least_squares(results: Run) -> Panels:
    panels: Panels = {}
    for run in results["runs"].values():
        settings = run["settings"]
        if settings["gamma"] == 0.99:
            rule = {"hessian": "Hessians", "second_moment": "second moments"}
            title = f"Sigma, with {rule[settings['preconditioner']]} and gamma 0.99"
            name = f"sigma {settings['sigma']:g}"
        else:
            often = "in every round" if settings["k0"] == 1 else "every k0 rounds"
            title, name = f"Gamma, applied {often}", f"gamma {settings['gamma']:g}"
        panel = panels.setdefault(
            title, Panel("iterations", "objective above the optimum", log=True)
        )
        # A logarithmic axis has no place for the rounding errors below zero.
        panel.line(name).add(run["iteration"], [max(gap, 1e-16) for gap in run["gap"]])
    return panels


def _defaults(results: Run) -> Panels:
    panels: Panels = {}
    for run in results["runs"]:
        metric = f"{results['tasks'][run['task']]['metric']}, validation data"
        title = f"{run['task']}, {run['schedule']} rate"
        name = re.sub("^adamw-", "AdamW at ", run["optimizer"])
        steps = [run["steps"] * (k + 1) / len(run["curve"]) for k in range(len(run["curve"]))]
        panels.setdefault(title, Panel("steps", metric)).line(_name(name)).add(steps, run["curve"])
    return panels


_vision = _recipe(
    ("epoch", "epochs"),
    [
        Column("test_accuracy", "test accuracy (%)", scale=100.0, percent=True),
        Column("loss", "training loss", log=True),
    ],
    lambda s: s["model"],
)
SOURCES: dict[str, Callable[[Run], Panels]] = {
    "demo": _demo,
    "defaults": _defaults,
    "gan": _recipe(
        ("epoch", "epochs"), [Column("fid", "Fréchet distance", log=True)], lambda s: s["kind"]
    ),
    "heterogeneity": _heterogeneity,
    "language": _language,
    "language_finetune": _recipe(
        ("epoch", "epochs"),
        [Column("test_loss", "test loss"), Column("loss", "training loss")],
        lambda s: s["model"],
    ),
    "language_stages": _language_stages,
    "least_squares": _least_squares,
    "rl": _recipe(
        ("steps", "environment steps"),
        [Column("reward", "reward")],
        lambda s: f"{s['task']}_{s['algorithm']}",
    ),
    "rnn": _recipe(
        ("epoch", "epochs"),
        [
            Column("test_perplexity", "test perplexity", log=True),
            Column("perplexity", "training perplexity", log=True),
        ],
        lambda s: f"{s['layers']} layer{'s' * (s['layers'] > 1)}",
    ),
    "vision": _vision,
    "vision_paper": _vision,
}
