"""Trials of all optimizers, and what is chosen from them."""

import dataclasses
import json
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from recipes.language import RECIPE, config
from recipes.language.choose import choose, main
from recipes.language.config import BASES, CHANGES, PRESETS, Settings, finalist, plan
from tests.recipes.language.synthetic import results

CONFIG = PRESETS["trials"]


def test_every_optimizer_has_the_same_trials() -> None:
    counts = Counter(run.choice.name for run in plan(CONFIG).values())
    assert counts == dict.fromkeys(BASES, len(CHANGES))
    assert set(CHANGES) == {"base", "decay", "momentum", "warm_down", "rate", "other_rate"}
    for change in CHANGES:
        assert set(CHANGES[change]) == set(BASES)
    choices = {
        (run.choice.name, str(run.choice.options), run.choice.warm_down)
        for run in plan(CONFIG).values()
    }
    assert len(choices) == len(plan(CONFIG))  # every change changes something


def losses(settings: Settings) -> float | None:
    if settings.label == "adamw_momentum":
        return None
    better = {"adamw_decay": 0.2, "muon_rate": 0.1, "muon_decay": 0.3}
    return 5.0 - better.get(settings.label, 0.0)


def test_the_lowest_loss_is_chosen() -> None:
    chosen = choose(results(CONFIG, losses))
    assert chosen["adamw"]["changes"] == chosen["muon"]["changes"] == ["decay"]
    assert chosen["adamw"]["losses"]["momentum"] == float("inf")
    assert chosen["sisa"]["changes"] == []
    assert all(len(entry["losses"]) == len(CHANGES) for entry in chosen.values())


def test_rates_lie_on_both_sides_or_beyond() -> None:
    """An optimizer's second change of its rate goes beyond the better one of the other two."""
    chosen = json.loads(config.CHOSEN.read_text(encoding="utf-8"))
    for name in BASES:
        option = "sigma" if name == "nsisa" else "lr"
        base, rate, other = (
            {**BASES[name], **CHANGES[change][name]}[option]
            for change in ("base", "rate", "other_rate")
        )
        losses = chosen[name]["losses"]
        better, worse = (rate, base) if losses["rate"] < losses["base"] else (base, rate)
        assert (other < better < worse) or (other > better > worse), name


def test_a_change_that_some_have_not_tried_does_not_count() -> None:
    done = results(CONFIG, losses)
    del done["runs"]["shampoo_decay_m1_seed0"]
    chosen = choose(done)
    assert chosen["muon"]["changes"] == ["rate"]
    assert all("decay" not in entry["losses"] for entry in chosen.values())
    del done["runs"]["soap_base_m1_seed0"]
    with pytest.raises(ValueError, match="trials must have the base of every optimizer"):
        choose(done)


def test_trials_of_another_model() -> None:
    args = Namespace(model="gpt2-medium", tokens=None, steps=None)
    done = results(config.configure(CONFIG, args), lambda s: 5.0 - ("muon_rate" in s.label))
    assert choose(done)["muon"]["changes"] == ["rate"]
    assert "| Muon | 5.000 | 5.000 | 5.000 | 5.000 | **4.000** | 5.000 |" in (RECIPE.report or str)(
        done
    )


def test_finalists_have_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials, chosen = tmp_path / "trials.json", tmp_path / "chosen.json"
    trials.write_text(json.dumps(results(CONFIG, losses)), encoding="utf-8")
    main([str(trials), "--out", str(chosen)])
    assert "muon: decay (base 5.000, decay 4.700" in capsys.readouterr().out
    monkeypatch.setattr(config, "CHOSEN", chosen)
    muon, adamw, sisa = (finalist(name).choice for name in ("muon", "adamw", "sisa"))
    assert muon.options["weight_decay"] == adamw.options["weight_decay"] == 0.1
    assert adamw.warm_up == 40  # of 320 steps as 10 of the 80 of a trial
    assert "weight_decay" not in sisa.options


def test_table_of_trials() -> None:
    done = results(CONFIG, losses)
    assert RECIPE.check(done) == []
    text = RECIPE.report(done) if RECIPE.report else ""
    assert "| Muon | 5.000 | **4.700** | 5.000 | 5.000 | 4.900 | 5.000 |" in text
    assert "| AdamW | 5.000 | **4.800** | inf | 5.000 | 5.000 | 5.000 |" in text
    # A change that nobody had has no column.
    done["runs"] = {name: run for name, run in done["runs"].items() if "other_rate" not in name}
    text = RECIPE.report(done) if RECIPE.report else ""
    assert "| base | decay | momentum | warm-down | rate |\n" in text


def test_nano_has_all_optimizers_and_seeds_of_the_best() -> None:
    runs = plan(PRESETS["nano"])
    alone = {run.choice.name for run in runs.values() if run.batches == 1 and run.seed == 0}
    assert alone == set(BASES)
    assert {run.choice.name for run in runs.values() if run.batches == 4} == {
        "nsisa",
        "misa",
        "sisa",
    }
    assert {run.choice.name for run in runs.values() if run.seed == 1} == {"misa", "muon", "nsisa"}
    for run in runs.values():
        assert run.steps * run.sequences * 1024 > 20e6
    paper = runs["nsisa_paper_m4_seed0"].choice.options
    assert (paper["sigma"], paper["rho"], paper["dual_decay"]) == (80.0, 100.0, 1.0)


def test_larger_models_see_five_million_tokens() -> None:
    runs = plan(PRESETS["sizes"])
    names = {(run.model, run.choice.name) for run in runs.values()}
    four = ("nsisa", "misa", "muon", "adamw")
    assert names == {(model, name) for model in ("gpt2-medium", "gpt2-xl") for name in four}
    trials = Counter((run.model, run.choice.name) for run in runs.values())
    assert {trials["gpt2-medium", name] for name in four} == {2}
    assert all(run.steps * run.sequences * 1024 > 5e6 for run in runs.values())
    changed = dataclasses.replace(PRESETS["sizes"], seed=5)
    assert set(plan(changed)) == set(runs)  # seeds are given
