"""Committed files fit together: trials and choices, plans, results and reports."""

import dataclasses
import json
from pathlib import Path

import pytest

from recipes import __main__ as command
from recipes import budgets, gan, heterogeneity, language, rl, rnn, vision
from recipes.budgets.config import read_chosen
from recipes.budgets.results import choose
from recipes.heterogeneity import tune
from recipes.heterogeneity.config import TUNING
from recipes.language import finetune, memory
from recipes.language.choose import choose as choose_changes
from recipes.language.config import CHOSEN
from recipes.recipe import Recipe, Results

RESULTS = Path(__file__).parents[2] / "docs" / "results"
RECIPES = {
    "heterogeneity": heterogeneity.RECIPE,
    "budgets": budgets.RECIPE,
    "budgets_trials": budgets.RECIPE,
    "budgets_digits": budgets.RECIPE,
    "budgets_digits_trials": budgets.RECIPE,
    "budgets_few_rounds": budgets.RECIPE,
    "budgets_few_rounds_trials": budgets.RECIPE,
    "language": language.RECIPE,
    "language_trials": language.RECIPE,
    "language_nano": language.RECIPE,
    "language_sizes": language.RECIPE,
    "language_stages": language.RECIPE,
    "language_finetune": finetune.RECIPE,
    "vision": vision.RECIPE,
    "vision_paper": vision.RECIPE,
    "gan": gan.RECIPE,
    "rnn": rnn.RECIPE,
    "rl": rl.RECIPE,
}


def saved(name: str) -> Results:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "recipe"), [*RECIPES.items(), ("language_seed1", language.RECIPE)]
)
def test_runs_have_the_settings_of_the_plan(name: str, recipe: Recipe) -> None:
    results = saved(name)
    preset = recipe.presets[results["preset"]]
    plan = recipe.plan(dataclasses.replace(preset, seed=results["config"]["seed"]))
    assert set(results["runs"]) | set(results["missing"]) == set(plan)
    for run, done in results["runs"].items():
        assert done["settings"] == json.loads(json.dumps(dataclasses.asdict(plan[run]))), run


@pytest.mark.parametrize(("name", "recipe"), RECIPES.items())
def test_page_is_the_report_of_the_results(name: str, recipe: Recipe) -> None:
    assert recipe.report is not None
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert page == recipe.report(saved(name))


def test_memory_page_is_the_report_of_the_results() -> None:
    page = (RESULTS / "language_memory.md").read_text(encoding="utf-8")
    assert page == memory.report(saved("language_memory"))


@pytest.mark.parametrize(("name", "recipe"), RECIPES.items())
def test_saved_statements_follow_from_the_results(name: str, recipe: Recipe) -> None:
    results = saved(name)
    assert results["checks"] == [dataclasses.asdict(check) for check in recipe.check(results)]


def test_chosen_settings_of_language_models_follow_from_the_trials() -> None:
    assert json.loads(CHOSEN.read_text(encoding="utf-8")) == choose_changes(
        saved("language_trials")
    )


def test_chosen_settings_of_equal_costs_follow_from_the_trials() -> None:
    assert read_chosen() == {
        "many rounds": choose(saved("budgets_trials")),
        "few rounds, digits": choose(saved("budgets_digits_trials")),
        "few rounds": choose(saved("budgets_few_rounds_trials")),
    }


def test_chosen_settings_follow_from_the_trials() -> None:
    for entry in json.loads(TUNING.read_text(encoding="utf-8")):
        trials = entry["trials"]
        assert entry["count"] == len(trials)
        assert entry["chosen"] == tune.choose(trials, entry["by"]), tune.entry_cell(entry)
        assert all(trial["settings"]["validation"] for trial in trials)


@pytest.mark.parametrize(("name", "file"), [("language", "language_nano"), ("budgets", "budgets")])
def test_choose_refuses_what_are_no_trials(
    name: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves what was chosen as it is."""
    out = tmp_path / "chosen.json"
    (tmp_path / "empty.json").write_text('{"runs": {}}', encoding="utf-8")
    for path in (RESULTS / f"{file}.json", tmp_path / "missing.json", tmp_path / "empty.json"):
        with pytest.raises(SystemExit):
            command.main([name, "choose", str(path), "--out", str(out)])
        assert "trials must be " in capsys.readouterr().err
    assert not out.exists()
