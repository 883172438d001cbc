"""The comparison of stages: loss over seeds, time, state and memory of every optimizer."""

import statistics
from pathlib import Path
from typing import Any

from recipes.language.check import format_loss
from recipes.language.figure import COLOUR_OF
from recipes.language.optimizers import TITLES
from recipes.language.results import describe
from recipes.recipe import Check, Results
from recipes.style import DASHES, INK, figure_style
from recipes.tables import checks_table, markdown, provenance

__all__ = ["check", "compares_stages", "draw", "report"]

ADAM_BYTES = 8.0
GOAL, BEST_GOAL = 3.95, 3.93  # validation loss, mean over the seeds

Runs = list[dict[str, Any]]


def compares_stages(results: Results) -> bool:
    """Return whether results are of a comparison of optimizers over seeds."""
    config = results["config"]
    seeds = [trial.get("seed") for trial in config["trials"]]
    return config.get("compares", "trials") == "trials" and any(seed is not None for seed in seeds)


def by_label(results: Results) -> dict[str, Runs]:
    """Return the seeds of every setting."""
    groups: dict[str, Runs] = {}
    for run in results["runs"].values():
        groups.setdefault(run["settings"]["label"], []).append(run)
    return groups


def losses(runs: Runs) -> list[float]:
    """Return the last losses of the seeds; those that diverged have none."""
    return [run["last"] for run in runs if run["last"] is not None]


def mean(runs: Runs) -> float:
    """Return the mean loss over the seeds; infinite if one diverged."""
    found = losses(runs)
    return statistics.fmean(found) if len(found) == len(runs) else float("inf")


def title(settings: dict[str, Any]) -> str:
    """Return a title such as "MISA, whitened"."""
    choice = settings["choice"]
    options, words = choice["options"], [TITLES[choice["name"]]]
    before = options.get("before") or {}
    if choice["name"] == "misa" and before.get("stage") == "whiten":
        words.append("whitened")
    if choice["name"] == "misa" and before.get("stage") == "eigenbasis":
        words.append("eigenbasis of " + ("both sides" if before["sides"] == "both" else "one side"))
    if options.get("damping"):
        words.append("damped")
    if choice["name"] == "muon" and choice["rest"] == "misa":
        words.append("the rest by MISA's rule")
    return ", ".join(words)


def check(results: Results) -> list[Check]:
    """Check the goals for MISA: with no more state than Adam, and with any stage."""
    ours = {
        label: runs
        for label, runs in by_label(results).items()
        if runs[0]["settings"]["choice"]["name"] == "misa" and len(runs) >= 3
    }
    small = {label: runs for label, runs in ours.items() if state_of(runs[0]) <= ADAM_BYTES}
    goals = (("at most Adam's 8 bytes per parameter", small, GOAL), ("any stage", ours, BEST_GOAL))
    checks = []
    for which, groups, goal in goals:
        if groups:
            label = min(groups, key=lambda name: mean(groups[name]))
            here = f"{show_losses(groups[label])}, {label}"
            claim = f"{which}: at most {goal}, mean of three seeds"
            checks.append(Check("MISA", claim, here, mean(groups[label]) <= goal))
    return checks


def state_of(run: dict[str, Any]) -> float:
    """Return bytes of state per parameter."""
    return float(run["state_bytes"] / run["parameters"])


def show_losses(runs: Runs) -> str:
    """Return the mean, and how far the seeds are apart."""
    found = losses(runs)
    if len(found) < len(runs):
        return "diverged"
    if len(found) == 1:
        return format_loss(runs[0])
    return f"{mean(runs):.3f} ({min(found):.3f} to {max(found):.3f})"


def show_test_loss(runs: Runs) -> str:
    """Return the mean over the seeds on tokens that chose nothing; early runs have none."""
    tests = [run.get("test") for run in runs]
    known = [test for test in tests if test is not None]
    return f"{statistics.fmean(known):.3f}" if len(known) == len(tests) else "-"


def report(results: Results) -> str:
    """Return all tables."""
    config, groups = results["config"], by_label(results)
    first = next(iter(groups.values()))[0]
    text = (
        f"Validation loss of a GPT-2 of {first['parameters'] / 1e6:,.1f}M parameters after "
        f"{config['steps']} steps of {config['sequences']} sequences "
        f"({first['tokens'][-1] / 1e6:,.1f}M tokens, {config['tokens']}): the mean over the seeds "
        "and, with more than one, the lowest and the highest. NorMuon and SOAP-Muon are their "
        "published rules for matrices (SOAP-Muon with NorMuon's rows), computed by MISA's code "
        "with Nesterov momentum. Everyone has two settings: one without decay, and one with which "
        "matrices decay by 0.2 % a step. *Other tokens*: the mean on validation tokens that nobody "
        "looked at. Time of the optimizer's part of a step by events on the GPU; peak memory is "
        "that of the whole training."
    )
    lines = []
    for runs in sorted(groups.values(), key=mean):
        run = runs[0]
        peak = run.get("peak_bytes")
        lines.append(
            [
                *(title(run["settings"]), describe(run["settings"]), str(len(runs))),
                f"**{show_losses(runs)}**",
                show_test_loss(runs),
                "-" if run["optimizer_ms"] is None else f"{run['optimizer_ms']:.1f}",
                f"{run['step_ms']:,.0f}",
                f"{state_of(run):.2f}",
                f"{peak / 2**30:.1f}" if peak else "-",
            ]
        )
    heads = ["", "settings", "seeds", "loss at the end", "other tokens"]
    heads += ["optimizer, ms", "whole step, ms", "state, bytes per parameter", "peak memory, GiB"]
    parts = [text, markdown(heads, lines)]
    checks = check(results)
    if checks:
        parts += ["**Goals**:", checks_table(checks, "goal")]
    done, missing = (
        {name.rpartition("_m")[0] for name in results.get(of, ())} for of in ("runs", "missing")
    )
    if missing - done:
        parts.append(f"Planned and not run: {', '.join(sorted(missing - done))}.")
    if missing & done:
        parts.append(f"Some seeds were not run of: {', '.join(sorted(missing & done))}.")
    return "\n\n".join([*parts, provenance(results)]) + "\n"


def draw(results: Results, path: Path) -> None:
    """Draw the loss of everyone's best trial against its time; a bar spans the seeds."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    groups: dict[str, Runs] = {}  # the best trial of each
    for runs in sorted(by_label(results).values(), key=mean):
        if mean(runs) < float("inf"):
            groups.setdefault(title(runs[0]["settings"]), runs)
    with figure_style("language"):
        figure = Figure((6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        latest = max(run["optimizer_ms"] or 1.0 for runs in groups.values() for run in runs)
        for name, runs in groups.items():
            settings, found = runs[0]["settings"], losses(runs)
            time = runs[0]["optimizer_ms"] or 1.0
            colour = COLOUR_OF[settings["choice"]["name"]]
            axes.plot([time, time], [min(found), max(found)], color=colour, lw=1.2)
            axes.plot([time], [mean(runs)], "o", color=colour, ms=4)
            left = time > latest / 4  # where there is no room to the right
            axes.annotate(
                *(name, (time, mean(runs))),
                **{"xytext": (-5 if left else 5, 0), "textcoords": "offset points"},
                **{"ha": "right" if left else "left", "va": "center", "fontsize": 7},
            )
        axes.axhline(GOAL, color=INK, lw=0.8, ls=DASHES)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.margins(x=0.1, y=0.1)
        axes.grid(color=INK, alpha=0.2, lw=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("time of the optimizer, ms per step")
        axes.set_ylabel("validation loss, nats")
        figure.savefig(path, transparent=True, metadata={"Date": None})
