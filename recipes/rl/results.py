"""Results: condensed runs, statements, picture and tables."""

import statistics
from pathlib import Path
from typing import Any

from recipes import curves
from recipes.curves import Panel, Run, describe_settings, display_name, run_facts
from recipes.recipe import Check, Results
from recipes.rl.config import PRESETS, TASKS
from recipes.tables import checks_table, count_runs, markdown, mean_sd

__all__ = ["LAST", "check", "condense", "draw", "report"]

CURVES = ("steps", "reward", "spread", "length", "training_reward")
LAST = 3  # evaluations that make the final reward
REMARKS = {"sisa": "", "misa": " (not in the paper)", "sisa_lr": " (not in the paper)"}
GROWTH = 2.0  # of the first reward, by which the preset `quick` shows that it learns


def condense(log: dict[str, Any]) -> Run:
    """Return final and best reward, speed and the curves."""
    rewards = [value for value in log["reward"] if value is not None]
    facts = run_facts(log)
    return {
        **facts,
        "final": None if facts["diverged"] else round(statistics.fmean(rewards[-LAST:]), 1),
        "best": round(max(rewards), 1),
        "steps_per_second": round(log["steps"][-1] / max(log["elapsed"][-1], 1e-9)),
        **{name: log[name] for name in CURVES},
    }


def by_task(results: Results) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Return runs by task and algorithm, and by optimizer."""
    return curves.group_runs(
        results, lambda run: (run["settings"]["task"], run["settings"]["algorithm"])
    )


def finals(runs: list[Run]) -> list[float]:
    """Return the final rewards of the runs that did not diverge."""
    return [run["final"] for run in runs if run["final"] is not None]


def check(results: Results) -> list[Check]:
    """Compare the rewards with the paper, where SISA's is above Adam's; check ours likewise.

    Of the preset `quick` only that every optimizer learns.
    """
    if results["config"]["epoch_steps"] < PRESETS["paper"].epoch_steps:
        return list(map(check_growth, results["runs"].values()))
    checks = []
    for (task, algorithm), runs in by_task(results).items():
        for name, remark in REMARKS.items():
            if all(finals(runs.get(label, [])) for label in (name, "adam")):
                ours, adam = (statistics.fmean(finals(runs[label])) for label in (name, "adam"))
                checks.append(
                    Check(
                        panel_title(task, algorithm),
                        f"{display_name(name)} above Adam{remark}",
                        f"{ours:,.0f} and {adam:,.0f}",
                        ours > adam and not any(run["diverged"] for run in runs[name]),
                    )
                )
    return checks


def check_growth(run: Run) -> Check:
    first, last = run["reward"][0], run["final"]
    learns = last is not None and last >= GROWTH * first
    here = "diverged" if last is None else f"{first:.0f} to {last:.0f}"
    settings = run["settings"]
    optimizer = display_name(settings["choice"]["label"])
    return Check(
        f"{panel_title(settings['task'], settings['algorithm'])}, {optimizer}",
        f"the reward grows {GROWTH:g}-fold",
        here,
        learns,
    )


def panel_title(task: str, algorithm: str) -> str:
    return f"{TASKS[task].title}, {algorithm.upper()}"


def draw(results: Results, path: Path) -> None:
    """Draw reward over steps, a panel per task."""
    panels = [
        Panel(panel_title(*key), "reward", runs, "steps", "reward")
        for key, runs in by_task(results).items()
    ]
    columns = 2 if len(panels) % 2 == 0 else 1
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    curves.draw(rows, path, "rl", "environment steps")


def report(results: Results) -> str:
    """Return all tables."""
    episodes = results["config"]["episodes"]
    parts = [
        f"Rewards of {episodes} episodes, mean over the last {LAST} evaluations, then mean and "
        "standard deviation over seeds. *Best* is the best evaluation of each seed. Settings are "
        "the paper's row for SISA, Tianshou's for Adam, and Adam's learning rate for the others: "
        "nothing was tuned.",
    ]
    for key, runs in by_task(results).items():
        parts += [f"**{panel_title(*key)}**", rewards(runs)]
    parts += ["**Statements**:", checks_table(check(results)), speed_and_versions(results)]
    return "\n\n".join(parts) + "\n"


def rewards(by_optimizer: dict[str, list[Run]]) -> str:
    lines = []
    for label, runs in by_optimizer.items():
        diverged = sum(run["diverged"] for run in runs)
        lines.append(
            [
                *(display_name(label), describe_settings(runs[0]["settings"])),
                f"{len(runs)}" + (f" ({diverged} diverged)" if diverged else ""),
                f"{max(run['steps'][-1] for run in runs):,}",
                mean_sd((run["reward"][0] for run in runs), 0),
                f"**{mean_sd(finals(runs), 0)}**",
                mean_sd((run["best"] for run in runs), 0),
            ]
        )
    return markdown(["", "settings", "seeds", "steps", "at first", "at the end", "best"], lines)


def speed_and_versions(results: Results) -> str:
    runs = list(results["runs"].values())
    versions = {
        name: ", ".join(dict.fromkeys(run["versions"].get(name) or "-" for run in runs))
        for name in ("torch", "tianshou", "gymnasium", "mujoco")
    }
    processors = ", ".join(dict.fromkeys(run["hardware"]["cpu"] for run in runs))
    speeds = [run["steps_per_second"] for run in runs]
    return (
        f"{count_runs(results)} on one core each, {min(speeds):,} to {max(speeds):,} environment "
        f"steps a second; "
        f"{processors}; {', '.join(f'{name} {value}' for name, value in versions.items())}."
    )
