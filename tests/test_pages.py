"""The tables of the README and of docs/results.md are those of the saved results."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import out_of_the_box, uneven_parts

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
DEFAULTS = ("out_of_the_box", "out_of_the_box_misa")


def runs(*names: str) -> list[dict[str, Any]]:
    return [run for name in names for run in saved(name)["runs"]]


def saved(name: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def rows_under(heading: str) -> list[str]:
    """The rows of the table whose head begins like this, without what makes the default bold."""
    _, _, rest = PAGE.partition(heading)
    lines = rest.replace("**", "").split("\n\n")[0].splitlines()
    return lines[2:]


def mean(found: list[dict[str, Any]], split: str, digits: int) -> str:
    value = statistics.mean(run[split] for run in found)
    return "diverged" if digits == 3 and value > 6 else f"{value:.{digits}f}"


def test_defaults() -> None:
    assert out_of_the_box.table(runs(*DEFAULTS)) in PAGE


def test_defaults_in_the_readme() -> None:
    groups = out_of_the_box.by_setting(runs(*DEFAULTS))
    names = {
        "mlp": "MLP on digits, accuracy",
        "cnn": "CNN on MNIST, accuracy",
        "transformer": "transformer on Penn Treebank characters, bits",
    }
    for task, title in names.items():
        own = [(key[1], found) for key, found in groups.items() if key[0] == task]
        better = own[0][1][0]["better"]
        digits, unit = (1, " %") if better > 0 else (3, "")
        adamw = [found for name, found in own if name == "adamw"]
        tuned = max(
            adamw, key=lambda found: better * statistics.mean(r["validation"] for r in found)
        )
        ours = [next(found for name, found in own if name == key) for key in out_of_the_box.OURS]
        cells = [mean(found, "test", digits) + unit for found in (tuned, *ours)]
        assert row(title, *cells) in README


def test_grid_of_sisa() -> None:
    groups: dict[tuple[float, ...], dict[str, list[dict[str, Any]]]] = {}
    for run in runs("sweep_mlp_cnn", "sweep_transformer"):
        if run["optimizer"] == "sisa":
            key = tuple(run["settings"][name] for name in ("sigma", "rho", "beta"))
            groups.setdefault(key, {}).setdefault(run["task"], []).append(run)
    expected = [
        row(
            *(f"{value:g}" for value in key),
            *(mean(groups[key][task], "validation", 1) for task in ("mlp", "cnn")),
            mean(groups[key]["transformer"], "validation", 3),
        )
        for key in sorted(groups)
    ]
    assert rows_under("| sigma | rho | beta |") == expected


def test_grid_of_misa_has_every_trial() -> None:
    cells: dict[tuple[float, float], dict[str, str]] = {}
    for task in ("mlp", "cnn"):
        for run in runs(f"sweep_misa_{task}"):
            key = run["settings"]["sigma"], run["settings"]["rho"]
            same = [r for r in runs(f"sweep_misa_{task}") if r["settings"] == run["settings"]]
            cells.setdefault(key, {})[task] = mean(same, "validation", 1)
    trials = saved("sweep_misa_language")["trials"].values()
    for trial in trials:
        options = trial["settings"]["choice"]["options"]
        key = options["sigma"], options["rho"]
        cells.setdefault(key, {})["language"] = f"{trial['last']:.3f}"
    expected = [
        row(*(f"{v:g}" for v in key), *(cells[key].get(t, "") for t in ("mlp", "cnn", "language")))
        for key in sorted(cells)
    ]
    assert rows_under("| sigma | rho | mlp | cnn | language |") == expected


def test_uneven_parts() -> None:
    plain = uneven_parts.table(runs("uneven_parts")).replace("**", "")
    assert plain in PAGE.replace("**", "")
