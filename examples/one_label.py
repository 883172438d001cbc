"""Ten clients with one digit each, round by round, as an animated picture.

    python examples/one_label.py --save docs/results/one_label.json --out docs/results/one_label.svg

The trainings are those of `demo.py` with its first seed. It shows, after every round, how many test
images of each digit the global model gets right, and the size of what each client remembers: its
dual, or for Scaffold its control variate less the mean of all. The picture is an SVG that moves by
itself; those who have asked their system for less motion see the last round.
"""

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo import ALGORITHMS, BEST, CLIENTS, COLOURS, DARK, ROUNDS, SEEDS, digits, whole_number
from torch import Tensor, nn

import torchpisa
from torchpisa.federated import Simulation
from torchpisa.federated.partition import by_label

NAMES = ("FedAvg", "Scaffold", "SISA", "MISA")
MEMORY = {"Scaffold": "control", "SISA": "dual", "MISA": "dual"}


# The trainings


def train(name: str, rounds: int) -> dict[str, Any]:
    """Return what happens in the rounds of one algorithm."""
    x, y, test_x, test_y = digits("test")
    parts = by_label(y, clients=CLIENTS, labels_per_client=1, seed=SEEDS[0])
    clients = [(x[part], y[part]) for part in parts.indices]
    torch.manual_seed(SEEDS[0])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    algorithm = ALGORITHMS[name](**BEST.get(f"clients/{name}", {}))
    simulation = Simulation(model, clients, algorithm, seed=SEEDS[0])
    owners = torch.argsort(torch.tensor([int(labels[0]) for _, labels in clients])).tolist()
    accuracy, recall, memory = [], [], []

    def measure(current: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            right = (current(test_x).argmax(1) == test_y).double()
        accuracy.append(round(100 * right.mean().item(), 2))
        recall.append([round(100 * right[test_y == k].mean().item(), 1) for k in range(CLIENTS)])
        memory.append([float(f"{norm:.3g}") for norm in remembered(simulation, name, owners)])
        return {}

    rows = simulation.run(rounds, evaluate=measure, progress=False)
    return {
        "algorithm": repr(algorithm),
        "samples_per_round": rows[-1]["samples"] / rounds,
        "accuracy": accuracy,
        "recall": recall,
        "memory": memory,
    }


def remembered(simulation: Simulation, name: str, owners: Sequence[int]) -> list[float]:
    """Return the norm of what the client of each digit remembers."""
    if name not in MEMORY:
        return [0.0] * len(owners)
    fields = [simulation.memory_of(client)[MEMORY[name]] for client in owners]
    vectors = torch.stack([_flat(tensors) for tensors in fields])
    if name == "Scaffold":
        vectors = vectors - _flat(simulation.server.memory["control"])
    return vectors.norm(dim=1).tolist()


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


# The picture


@dataclass
class Film:
    """The frames of the picture: a round each, and a rest at the end.

    Args:
        rounds: the number of rounds.
    """

    rounds: int
    seconds: float = 12.0
    rest: float = 4.0

    @property
    def duration(self) -> float:
        return self.seconds + self.rest

    def time(self, number: int) -> float:
        """Return when a round is shown, from 0 to 1."""
        return round(number / self.rounds * self.seconds / self.duration, 4)

    def animate(self, attribute: str, values: Sequence[float], mode: str = "linear") -> str:
        """Return an element that moves an attribute from round to round."""
        times = [self.time(number) for number in range(len(values))]
        row = ";".join(_number(value) for value in [*values, values[-1]])
        keys = ";".join(_number(time, 4) for time in [*times, 1.0])
        return (
            f'<animate attributeName="{attribute}" values="{row}" keyTimes="{keys}" '
            f'calcMode="{mode}" dur="{self.duration:g}s" repeatCount="indefinite"/>'
        )


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


WIDTH, HEIGHT = 760, 470
PANEL, BAR, TALL, FLOOR, DOTS = 180, 12, 100, 178, 206
CHART = {"left": 48, "right": 636, "top": 262, "bottom": 420}

Moves = Callable[[str, Sequence[float]], str]


def draw(saved: dict[str, Any]) -> str:
    """Return the picture of saved trainings."""
    runs = saved["runs"]
    rounds = len(runs[NAMES[0]]["accuracy"]) - 1
    film = Film(rounds)
    moving = _scene(runs, rounds, film.animate) + _counter(film)
    still = _scene(runs, rounds, lambda attribute, values: "")
    still += _text(20, 24, f"round {rounds}", "ink bold")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"
    font-family="system-ui, sans-serif" font-size="12">
<title>Ten clients with one digit each</title>
<desc>{_described(runs, rounds)}</desc>
<style>{_style()}</style>
<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>
<g class="moving">
{moving}
</g>
<g class="still">
{still}
</g>
</svg>
"""


def _style() -> str:
    light = {_class(name): COLOURS[name] for name in NAMES}
    dark = {_class(name): DARK.get(name, COLOURS[name]) for name in NAMES}
    return (
        ".page{fill:#ffffff}.ink{fill:#222222}.pale{fill:#5f5f5f}.rule{stroke:#d0d0d0}"
        ".bold{font-weight:600}.line{fill:none;stroke-width:2}.still{display:none}"
        + _coloured(light)
        + "@media(prefers-color-scheme:dark){.page{fill:#1d1f27}.ink{fill:#eeeeee}"
        ".pale{fill:#b4b4b4}.rule{stroke:#4a4d57}" + _coloured(dark) + "}"
        "@media(prefers-reduced-motion:reduce){.moving{display:none}.still{display:inline}}"
    )


def _coloured(colours: dict[str, str]) -> str:
    return "".join(
        f".{key}{{fill:{c}}}.{key}.line{{fill:none;stroke:{c}}}" for key, c in colours.items()
    )


def _class(name: str) -> str:
    return name.lower()


def _described(runs: dict[str, Any], rounds: int) -> str:
    ends = ", ".join(f"{name} {runs[name]['accuracy'][-1]:.1f} %" for name in NAMES)
    return (
        f"Bars: test images of each digit that the global model gets right. Dots: size of what the "
        f"client of that digit remembers. Below: accuracy by round. After {rounds} rounds: {ends}."
    )


def _scene(runs: dict[str, Any], rounds: int, moves: Moves) -> str:
    parts = [
        _text(
            WIDTH - 20,
            24,
            "bars: images of each digit that the global model gets right",
            "pale",
            "end",
        ),
        _text(WIDTH - 20, 236, "dots: what the client of that digit remembers", "pale", "end"),
    ]
    for number, name in enumerate(NAMES):
        parts.append(_panel(20 + number * PANEL, name, runs[name], moves))
    parts.append(_chart(runs, rounds, moves))
    return "\n".join(parts)


def _panel(left: float, name: str, run: dict[str, Any], moves: Moves) -> str:
    """Return ten bars, one for each digit, and ten dots below them."""
    largest = max(max(row) for row in run["memory"]) or 1.0
    parts = [_text(left, 58, name, f"{_class(name)} bold", size=15)]
    if not max(run["memory"][-1]):
        parts.append(_text(left, DOTS + 4, "clients remember nothing", "pale"))
    for digit in range(CLIENTS):
        x = left + digit * (BAR + 4)
        heights = [row[digit] / 100 * TALL for row in run["recall"]]
        tops = [FLOOR - height for height in heights]
        parts.append(
            f'<rect class="{_class(name)}" x="{_number(x)}" y="{_number(tops[-1])}" width="{BAR}" '
            f'height="{_number(heights[-1])}">{moves("y", tops)}{moves("height", heights)}</rect>'
        )
        parts.append(_text(x + BAR / 2, FLOOR + 14, str(digit), "pale", "middle", 10))
        radii = [6 * (row[digit] / largest) ** 0.5 for row in run["memory"]]
        if radii[-1]:
            parts.append(
                f'<circle class="{_class(name)}" cx="{_number(x + BAR / 2)}" cy="{DOTS}" '
                f'r="{_number(radii[-1])}">{moves("r", radii)}</circle>'
            )
    right = left + CLIENTS * (BAR + 4) - 4
    parts.append(_line(left, FLOOR, right, FLOOR))
    return "\n".join(parts)


def _chart(runs: dict[str, Any], rounds: int, moves: Moves) -> str:
    """Return the accuracies by round, uncovered from the left."""
    left, right, top, bottom = (CHART[key] for key in ("left", "right", "top", "bottom"))

    def across(number: float) -> float:
        return left + (right - left) * number / rounds

    def up(accuracy: float) -> float:
        return bottom - (bottom - top) * accuracy / 100

    parts = []
    for accuracy in (0, 50, 90, 100):
        parts.append(_line(left, up(accuracy), right, up(accuracy)))
        parts.append(_text(left - 6, up(accuracy) + 4, f"{accuracy} %", "pale", "end", 10))
    for number in range(0, rounds + 1, 10):
        parts.append(_text(across(number), bottom + 16, str(number), "pale", "middle", 10))
    parts.append(_text((left + right) / 2, bottom + 36, "rounds", "pale", "middle"))
    marks = [across(number) for number in range(rounds + 1)]
    for name in NAMES:
        curve = runs[name]["accuracy"]
        points = " ".join(
            f"{_number(x, 1)},{_number(up(y), 1)}" for x, y in zip(marks, curve, strict=True)
        )
        length = f'pathLength="{rounds}" stroke-dasharray="{rounds}" stroke-dashoffset="0"'
        hidden = _uncovered(marks, [up(y) for y in curve])
        parts.append(
            f'<polyline class="{_class(name)} line" points="{points}" {length}>'
            f"{moves('stroke-dashoffset', [rounds * part for part in hidden])}</polyline>"
        )
        parts.append(
            f'<circle class="{_class(name)}" r="4" cx="{_number(marks[-1])}" '
            f'cy="{_number(up(curve[-1]))}">{moves("cx", marks)}'
            f"{moves('cy', [up(y) for y in curve])}</circle>"
        )
    ends = _apart({name: up(runs[name]["accuracy"][-1]) + 4 for name in NAMES})
    for name, y in ends.items():
        label = f"{name} {runs[name]['accuracy'][-1]:.1f}"
        parts.append(_text(right + 10, y, label, f"{_class(name)} bold"))
    return "\n".join(parts)


def _uncovered(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Return the part of a curve that is still hidden at each of its points."""
    steps = [
        ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        for x0, x1, y0, y1 in zip(xs, xs[1:], ys, ys[1:], strict=False)
    ]
    done = [sum(steps[:number]) for number in range(len(xs))]
    return [1 - length / done[-1] for length in done]


def _apart(places: dict[str, float], gap: float = 15) -> dict[str, float]:
    """Return heights of labels, moved so that they do not touch."""
    order = sorted(places, key=lambda name: places[name])
    heights = [places[name] for name in order]
    for number in range(1, len(heights)):
        heights[number] = max(heights[number], heights[number - 1] + gap)
    shift = (heights[-1] - places[order[-1]]) / 2
    return {name: height - shift for name, height in zip(order, heights, strict=True)}


def _counter(film: Film) -> str:
    """Return a text for each round, of which one is seen at a time."""
    parts = []
    for number in range(film.rounds + 1):
        seen = [float(other == number) for other in range(film.rounds + 1)]
        frames = film.animate("opacity", seen, "discrete")
        parts.append(_text(20, 24, f"round {number}", "ink bold", inside=frames, opacity=seen[-1]))
    return "\n".join(parts)


def _text(
    x: float,
    y: float,
    text: str,
    look: str,
    anchor: str = "start",
    size: int = 12,
    *,
    inside: str = "",
    opacity: float = 1.0,
) -> str:
    faded = "" if opacity == 1 else f' opacity="{_number(opacity)}"'
    return (
        f'<text class="{look}" x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}" '
        f'font-size="{size}"{faded}>{text}{inside}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
    return f'<line class="rule" {ends}/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=whole_number, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--save", type=Path, help="write all numbers to a JSON file")
    parser.add_argument("--show", type=Path, help="draw such a file instead of training")
    parser.add_argument("--out", type=Path, default=Path("one_label.svg"), help="the picture")
    options = parser.parse_args()
    if options.show is not None:
        saved = json.loads(options.show.read_text(encoding="utf-8"))
    else:
        torch.set_num_threads(1)
        saved = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torchpisa": torchpisa.__version__,
            "machine": f"{platform.machine()}, one thread",
            "seed": SEEDS[0],
            "runs": {name: train(name, options.rounds) for name in NAMES},
        }
    if options.save is not None:
        options.save.write_text(json.dumps(saved) + "\n", encoding="utf-8")
    options.out.write_text(draw(saved), encoding="utf-8")
    for name in NAMES:
        print(f"{name}: {saved['runs'][name]['accuracy'][-1]:.1f} %")


if __name__ == "__main__":
    main()
