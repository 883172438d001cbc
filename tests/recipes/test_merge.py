"""Results of several machines in one file."""

import copy
import json
from pathlib import Path

import pytest

from recipes.merge import main
from recipes.recipe import Results

SAVED = Path(__file__).parents[2] / "docs" / "results" / "gan.json"


def write(path: Path, results: Results) -> Path:
    path.write_text(json.dumps(results), encoding="utf-8")
    return path


def test_runs_of_both_are_there_in_the_order_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(SAVED.read_text(encoding="utf-8"))
    halves = [copy.deepcopy(whole) for _ in range(2)]
    for number, name in enumerate(whole["runs"]):
        del halves[number % 2]["runs"][name]
    again = next(iter(halves[1]["runs"]))
    halves[0]["runs"][again] = {**halves[1]["runs"][again], "last": 1.0}  # the last file's counts
    halves[0]["checks"] = []
    into, other = write(tmp_path / "a.json", halves[0]), write(tmp_path / "b.json", halves[1])
    main([str(into), str(other)])
    assert json.loads(into.read_text(encoding="utf-8")) == whole
    assert into.with_suffix(".md").read_text("utf-8") == SAVED.with_suffix(".md").read_text("utf-8")
    assert into.with_suffix(".svg").is_file()
    assert f"{len(whole['runs'])} runs, {len(whole['missing'])} missing" in capsys.readouterr().out


def test_what_does_not_belong_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads(SAVED.read_text(encoding="utf-8"))
    into = write(tmp_path / "a.json", whole)
    name, run = next(iter(whole["runs"].items()))
    wrong = {
        "preset must be 'short', got 'paper'": {**whole, "preset": "paper"},
        "recipe must be 'gan', got 'rnn'": {**whole, "recipe": "rnn"},
        "runs must be among the preset's, got 'x'": {**whole, "runs": {"x": run}},
        f"settings of {name} must be the preset's": {
            **whole,
            "runs": {name: {**run, "settings": {**run["settings"], "epochs": 1}}},
        },
    }
    for message, results in wrong.items():
        other = write(tmp_path / "b.json", results)
        with pytest.raises(SystemExit):
            main([str(into), str(other)])
        assert message in capsys.readouterr().err
        assert json.loads(into.read_text(encoding="utf-8")) == whole
    with pytest.raises(SystemExit):
        main([str(into), str(tmp_path / "none.json")])
    assert "files must be there" in capsys.readouterr().err
