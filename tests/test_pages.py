"""The tables of docs/results.md are those of the saved results."""

import json
from pathlib import Path
from typing import Any

from benchmarks import uneven_parts
from benchmarks.defaults import report as defaults

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def runs(*names: str) -> list[dict[str, Any]]:
    return [run for name in names for run in saved(name)["runs"]]


def saved(name: str) -> dict[str, Any]:
    path = ROOT / "docs" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_uneven_parts() -> None:
    plain = uneven_parts.table(runs("uneven_parts")).replace("**", "")
    assert plain in PAGE.replace("**", "")


def test_defaults() -> None:
    assert defaults.overview(runs("defaults")) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_gpt2() -> None:
    """The README's table has cells of docs/results/language.md, rounded."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "results" / "language.md").read_text(encoding="utf-8")
    for name, shown in (("AdamW", "AdamW"), ("Muon", "Muon + AdamW"), ("MISA", "MISA")):
        line = next(line for line in page.splitlines() if line.startswith(f"| {name} | "))
        _, _, trials, _, _, loss, _, time, state, *_ = (cell.strip() for cell in line.split("|"))
        cells = [
            shown,
            loss.strip("*"),
            trials,
            state.split()[0],
            f"{float(time.split()[0]):.1f} ms",
        ]
        assert "| " + " | ".join(cells) + " |" in readme, name
