"""The comparison of stages: queue, optimizers, report, and the model that its runs share."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchpisa
from recipes.language import RECIPE
from recipes.language.config import PRESETS, Settings, plan
from recipes.language.model import SIZES, build
from recipes.language.optimizers import build as build_team
from recipes.language.optimizers import choose, missing_requirement, state_bytes
from recipes.language.run import compiled_model, run
from tests.recipes.language.synthetic import results
from tests.recipes.language.test_run import CONFIG as TINY
from tests.recipes.language.test_run import untimed
from torchpisa.optim.param_groups import split
from torchpisa.preconditioners.consensus import EigenbasisMoment, Whiten

CONFIG = PRESETS["stages"]


def test_the_queue_has_two_trials_of_every_optimizer_and_then_seeds() -> None:
    runs = list(plan(CONFIG).values())
    assert len({each.name for each in runs}) == len(runs) == len(CONFIG.trials)
    assert {each.seed for each in runs[:17]} == {0}
    once, decayed = ([each.label for each in some] for some in (runs[:9], runs[9:17]))
    assert {"muon", "normuon", "soap_muon", "muon_rest_misa", "misa", "misa_all"} < set(once)
    assert decayed == [f"{name}_decay" for name in once if name != "misa_all"]
    for label in decayed:
        assert sorted(each.seed for each in runs if each.label == label) == [0, 1, 2]


def test_everybodys_matrices_decay_alike_and_nothing_else() -> None:
    model = build(SIZES["tiny"], 0)
    matrices = {id(param) for _, param in split(model, head=())[0]["params"]}
    for settings in [each for each in plan(CONFIG).values() if each.label.endswith("_decay")][:8]:
        if missing_requirement(settings.choice):  # torch's Muon, with an older torch
            continue
        for optimizer in build_team(settings.choice, model).optimizers:
            for group in optimizer.param_groups:
                decays = {id(param) for param in group["params"]} <= matrices
                per_step = group["lr"] * group["weight_decay"]
                assert per_step == pytest.approx(0.002 if decays else 0.0)


@pytest.mark.parametrize("settings", list(plan(CONFIG).values())[:9], ids=lambda s: s.label)
def test_every_run_can_be_built(settings: Settings) -> None:
    reason = missing_requirement(settings.choice)
    if reason is not None:
        pytest.skip(reason)
    team = build_team(settings.choice, build(SIZES["tiny"], 0))
    stages = {
        "misa_whiten": Whiten(every=10),
        "misa_one_side": EigenbasisMoment("smaller", every=5),
        **dict.fromkeys(
            ("misa_both_sides", "soap_muon", "misa_all"), EigenbasisMoment("both", every=5)
        ),
    }
    found = [each for each in team.optimizers if isinstance(each, torchpisa.MISA)]
    if settings.label == "muon":
        assert not found
        return
    (misa,) = found
    assert misa.defaults["before"] == stages.get(settings.label)
    if settings.choice.rest == "adamw":  # published rules
        assert misa.defaults["look_ahead"] == 1 + misa.defaults["momentum"]
    if settings.label == "muon_rest_misa":
        assert [group["matrix"] for group in misa.param_groups] == [False]
        assert "moment" in misa.state[misa.param_groups[0]["params"][0]]


def test_whitening_stays_within_adams_state() -> None:
    """8 bytes per parameter of GPT-2 124M, all of it, without building it in memory."""
    settings = plan(CONFIG)["misa_whiten_m1_seed0"]
    with torch.device("meta"):
        model = build(SIZES["gpt2"], 0)
    per_parameter = state_bytes(build_team(settings.choice, model)) / SIZES["gpt2"].parameters
    assert 6.2 < per_parameter < 6.4


def test_wrong_settings() -> None:
    model = build(SIZES["tiny"], 0)
    with pytest.raises(ValueError, match="stage must be one of whiten, eigenbasis, got 'soap'"):
        build_team(choose("misa", before={"stage": "soap"}), model)
    with pytest.raises(ValueError, match="rest must be 'adamw' or 'misa', got 'own'"):
        build_team(choose("muon", rest="own"), model)


def test_runs_of_a_process_share_the_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("torch.compile", lambda part, **options: asked.append(part) or part)
    compiled_model.cache_clear()
    trials = tuple(
        dataclasses.replace(trial, seed=seed)
        for trial in CONFIG.trials
        for seed in (0, 1)
        if trial.label == "misa_whiten" and trial.seed == 0
    )
    config = dataclasses.replace(TINY, trials=trials, steps=4)
    try:
        for settings in (*plan(config).values(), *plan(config).values()):
            shared = untimed(list(run(config, settings, device="cpu", compile=True)))
            assert shared == untimed(list(run(config, settings, device="cpu")))
    finally:
        compiled_model.cache_clear()
    assert len(asked) == 3  # two blocks and the output, once


def loss(settings: Settings) -> float | None:
    """Whitening ends at 3.948, both sides at 3.928, SOAP-Muon diverges with one seed."""
    if settings.label == "soap_muon_decay" and settings.seed == 2:
        return None
    ends = {"misa_whiten_decay": 3.948, "misa_both_sides_decay": 3.928}
    base = ends.get(settings.label, 3.97)
    return base + 0.002 * (settings.seed - 1)


def test_report_and_goals(tmp_path: Path) -> None:
    done = results(CONFIG, loss)
    for made in done["runs"].values():
        made["peak_bytes"], made["state_bytes"] = 3 * 2**30, 7 * made["parameters"]
        if "sides" in str(made["settings"]["choice"]["options"]):
            made["state_bytes"] = 20 * made["parameters"]
    text = RECIPE.report(done) if RECIPE.report else ""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    best = next(line for line in rows if line.startswith("| MISA, eigenbasis of both sides |"))
    assert "| 3 | **3.928 (3.926 to 3.930)** | 3.938 | 10.0 | 100 | 20.00 | 3.0 |" in best
    assert "| weight_decay 0.666667, eigenbasis (sides both, every 5), lr 0.003" in best
    assert "rest by its own rule without decay |" in best
    assert "| Muon, the rest by MISA's rule |" in text
    assert re.search(r"\| SOAP-Muon \|.*\*\*diverged\*\*", text)
    assert "| MISA, whitened | whiten (power 0.25, every 10), lr 0.003, momentum 0.85" in text
    goals = RECIPE.check(done)
    assert [goal.holds for goal in goals] == [True, True]
    assert goals[0].here == "3.948 (3.946 to 3.950), misa_whiten_decay"
    worse = results(CONFIG, lambda settings: 4.0)
    assert not any(goal.holds for goal in RECIPE.check(worse))
    one_seed = {name: made for name, made in done["runs"].items() if name.endswith("seed0")}
    assert not RECIPE.check({**done, "runs": one_seed})
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        RECIPE.draw(done, picture)
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert "MISA, whitened" in pictures[0].read_text(encoding="utf-8")


def test_report_names_what_was_not_run() -> None:
    done = results(CONFIG, loss)
    gone = [name for name in done["runs"] if name.startswith("misa_all_") or "_seed2" in name]
    done["missing"] = gone
    for name in gone:
        del done["runs"][name]
    text = RECIPE.report(done) if RECIPE.report else ""
    assert "\n\nPlanned and not run: misa_all" in text
    others = text.partition("Some seeds were not run of: ")[2].split("\n")[0]
    assert "misa_whiten" in others
    assert "misa_all" not in others
