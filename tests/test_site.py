"""The curves that a reader can choose from, in a real browser, and that no result is left out."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--enable-logging=stderr",  # errors of scripts
    *("--window-size=400,800", "--virtual-time-budget=10000", "--dump-dom"),
]
# What a reader does: look at every panel, return to the first, hide a curve, point at the middle.
VISIT = """
const notes = [...document.querySelectorAll("figure.curves")].map((figure) => {
  const names = () => [...figure.querySelectorAll("polyline")].map((line) => line.dataset.name);
  const choice = figure.querySelector("select");
  const pick = (number) => { choice.value = number; choice.dispatchEvent(new Event("change")); };
  const panels = [...choice.options].map((option, number) => {
    if (option.disabled) return { title: option.textContent, names: [] };
    pick(number);
    const missing = figure.querySelector(".curves-missing");
    return {
      title: option.textContent, names: names(), missing: missing ? missing.textContent : "",
      broken: figure.querySelector("svg").outerHTML.includes("NaN"),
      wide: figure.querySelector("svg").getBoundingClientRect().width > figure.clientWidth + 1,
    };
  });
  pick([...choice.options].findIndex((option) => !option.disabled));
  figure.querySelector("button").click();
  const svg = figure.querySelector("svg"), frame = svg.getBoundingClientRect();
  const at = { clientX: frame.left + frame.width / 2, clientY: frame.top + 5 };
  svg.dispatchEvent(new PointerEvent("pointermove", at));
  const values = figure.querySelector(".curves-values").textContent;
  return { name: figure.dataset.name, panels, left: names(), values };
});
document.body.dataset.notes = JSON.stringify(notes);
"""


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", DOCS / "_hooks" / "curves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def data(figure: str) -> list[dict[str, Any]]:
    """Return the data embedded in the figure of a page."""
    match = re.search(r'<script type="application/json">(.*?)</script>', figure, re.DOTALL)
    assert match is not None
    found: list[dict[str, Any]] = json.loads(match[1])
    return found


@pytest.fixture(scope="module")
def notes(curves: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what Chromium shows on a page with all curves."""
    if BROWSER is None:
        pytest.skip("needs Chromium")
    folder = tmp_path_factory.mktemp("site")
    figures = [
        curves.figure(name, "curves", "").replace("<figure", f'<figure data-name="{name}"')
        for name in curves.SOURCES
    ]
    style = (DOCS / "extra.css").read_text(encoding="utf-8")
    script = (DOCS / "js" / "curves.js").read_text(encoding="utf-8")
    page = folder / "index.html"
    page.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><body class=md-typeset>"
        f"{''.join(figures)}<script>{script}</script><script>{VISIT}</script>",
        encoding="utf-8",
    )
    profile = f"--user-data-dir={folder / 'profile'}"
    done = subprocess.run(
        [BROWSER, *OPTIONS, profile, page.as_uri()],
        **{"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 120},
    )
    (found,) = re.findall(r'data-notes="([^"]*)"', done.stdout) or [""]
    assert found, done.stderr[-2000:]
    seen = json.loads(found.replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))
    return {note["name"]: note for note in seen}


def test_every_panel_shows_its_curves(curves: ModuleType, notes: dict[str, Any]) -> None:
    assert set(notes) == set(curves.SOURCES)
    for name, note in notes.items():
        expected = data(curves.figure(name, "", ""))
        assert len(expected) > 1
        for panel, seen in zip(expected, note["panels"], strict=True):
            assert seen["names"] == [line["name"] for line in panel["lines"]], name
            if not panel["lines"]:
                assert seen["title"].endswith("(not run)")
                continue
            assert not seen["broken"], (name, seen["title"])
            assert not seen["wide"], (name, seen["title"])
            assert seen["missing"] == (
                f"Not run: {'; '.join(panel['missing'])}." if panel["missing"] else ""
            )


def test_curves_can_be_hidden_and_read(curves: ModuleType, notes: dict[str, Any]) -> None:
    for name, note in notes.items():
        panel = next(each for each in data(curves.figure(name, "", "")) if each["lines"])
        _, *shown = (line["name"] for line in panel["lines"])
        assert note["left"] == shown
        read = [value.rpartition(": ")[0] for value in note["values"].split("   ")]
        assert read == shown
    assert re.search(r"MISA, default: 2\.\d+ at 1[3-5]0", notes["demo"]["values"])


def test_curves_have_names_for_readers(curves: ModuleType) -> None:
    for name in curves.SOURCES:
        for panel in data(curves.figure(name, "", "")):
            shown = [line["name"] for line in panel["lines"]] + panel["missing"]
            assert not [each for each in shown if "_" in each], (name, panel["title"])
    assert curves._name("misa_whiten_decay") == "MISA, whitened, with decay"
    assert curves._name("adamw_lr0.0003") == "AdamW, lr 3e-4"


def test_values_are_those_of_the_file(curves: ModuleType) -> None:
    """The last points of the curves are the means that tables show."""
    results = json.loads((DOCS / "results" / "rnn.json").read_text(encoding="utf-8"))
    run = results["runs"]["lstm1_sisa_e20_seed0"]
    panel = data(curves.figure("rnn", "", ""))[0]
    assert panel["title"] == "1 layer, test perplexity"
    line = next(line for line in panel["lines"] if line["name"] == "SISA")
    assert line["x"] == run["epoch"]
    assert line["y"] == pytest.approx(run["test_perplexity"], rel=1e-3)


def test_what_was_not_run_is_named(curves: ModuleType) -> None:
    panels = {panel["title"]: panel for panel in data(curves.figure("rnn", "", ""))}
    assert panels["1 layer, test perplexity"]["missing"] == []
    assert panels["2 layers, test perplexity"]["missing"] == ["AdaBelief", "SGD"]
    cells = {panel["title"]: panel for panel in data(curves.figure("heterogeneity", "", ""))}
    assert "MISA" in cells["MNIST, 2 labels per client, by rounds"]["missing"]
    assert "MISA" not in cells["MNIST, 1 label per client, by rounds"]["missing"]


def test_missing_runs_are_assigned(curves: ModuleType) -> None:
    results = {
        "runs": {
            "vgg11_sisa_e2_seed0": {
                "settings": {"model": "vgg11", "choice": {"label": "sisa"}},
                **{"epoch": [1, 2], "test_accuracy": [0.5, None], "loss": [2.0, 1.0]},
            }
        },
        "missing": ["vgg11_misa_adam_rate_e2_seed1", "densenet121_sisa_e2_seed0"],
    }
    panels = curves.SOURCES["vision"](results)
    accuracy = panels["VGG-11, test accuracy (%)"]
    assert accuracy.lines["SISA"].mean() == {"x": [1], "y": [50], "runs": 1}
    assert accuracy.missing - set(accuracy.lines) == {"MISA, Adam's rate"}
    assert not panels["DenseNet-121, test accuracy (%)"].lines


def test_pictures_on_pages_become_curves(curves: ModuleType) -> None:
    """And those that no reader can choose from stay."""
    picture = '<p><img alt="Rewards" src="../results/{}.svg" /></p>'
    found = curves.on_page_content(picture.format("rl") + picture.format("partition"))
    assert found.count('<figure class="curves" aria-label="Rewards">') == 1
    assert f"<noscript>{picture.format('rl')}</noscript></figure>" in found
    assert found.endswith(picture.format("partition"))
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for name in curves.SOURCES:
        assert f"(results/{name}.svg)" in pages, f"no page shows the curves of {name}"
