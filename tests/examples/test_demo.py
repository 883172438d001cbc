"""The demo: it runs, compares and draws; pages have the numbers of its saved run."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.distributed.processes import CONTEXT

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.py"
SAVED = ROOT / "docs" / "results" / "demo.json"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def check_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert 1500 < width < 3000
    assert 400 < height < 1000
    assert 10_000 < len(content) < 500_000


def test_it_runs_compares_and_draws(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its processes are forked from one that has imported torch, instead of started anew."""
    options = ["--steps", "2", "--rounds", "2", "--save", "demo.json", "--dark", "dark.png"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(DEMO), *options])
    monkeypatch.syspath_prepend(DEMO.parent)  # where they find the demo
    monkeypatch.setattr(demo.multiprocessing, "get_context", lambda method: CONTEXT)
    demo.main()
    assert str((tmp_path / "demo.png").resolve()) in capsys.readouterr().out
    for name in ("demo.png", "dark.png"):
        check_picture(tmp_path / name)
    runs = demo.read(tmp_path / "demo.json")
    assert [row[0] for row in demo.client_rows(runs)] == list(demo.ALGORITHMS)
    assert {run.task.name for run in runs if run.task.part == "text"} >= {"AdamW", "MISA"}
    for run in runs:
        assert run.x[-1] == 2
        assert 0 < run.y[-1] < 100


def test_the_pages_have_the_saved_numbers(demo: ModuleType) -> None:
    runs, page = demo.read(SAVED), (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    assert demo.markdown(demo.TEXT_HEAD, demo.text_rows(runs)) in page
    rows = demo.client_rows(runs)
    assert demo.markdown(demo.CLIENT_HEAD, rows) in page
    rounds = {row[0]: row[1] for row in rows}
    assert rounds["Scaffold"] == rounds["SISA"]
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"MISA reaches 90 % after {rounds['MISA']} rounds, FedAvg with two local steps after "
        f"{rounds['FedAvg, 2 steps']}, Scaffold and SISA after {rounds['SISA']}."
    ) in readme


def test_settings_are_those_of_the_saved_trials(demo: ModuleType) -> None:
    trials = json.loads(SAVED.read_text(encoding="utf-8"))["trials"]
    for key, settings in demo.BEST.items():
        part, name = key.split("/")
        own = [t for t in trials if (t["task"]["part"], t["task"]["name"]) == (part, name)]
        assert len(own) == len(demo.RATES if part == "text" else demo.GRIDS[name])
        assert min(own, key=lambda t: t["score"])["task"]["settings"] == settings
    assert not [t for t in trials if t["task"]["seed"] in demo.SEEDS]


def test_rounds_are_counted_to_the_first_that_meets_the_target(demo: ModuleType) -> None:
    run = demo.Run(demo.Task("clients", "MISA"), [1, 2, 3], [50.0, 90.0, 80.0], [10, 20, 30], 0.0)
    assert demo.reached(run, run.x) == 2
    assert demo.reached(run, run.samples) == 20
    assert demo.middle([2, None, 4]) == "4"
    assert demo.middle([None, None, 4]) == "never"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--steps", "0"), ("--rounds", "-1"), ("--out", "nowhere/x.png"), ("--save", "x.txt")],
)
def test_bad_options_are_refused(
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(DEMO), f"{option}={value}"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DEMO), run_name="__main__")
    assert end.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message
    assert value in message
    assert not list(tmp_path.iterdir())


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(DEMO))
    assert end.value.code == "The demo needs rich: pip install 'torchpisa[demo]'"
