"""What is kept of a run, statements, picture and tables."""

import statistics
from pathlib import Path
from typing import Any

from recipes import curves
from recipes.curves import Panel, Run, describe, markdown, mean_sd, title
from recipes.recipe import Check, Results, table
from recipes.rl.config import PRESETS, TASKS

__all__ = ["LAST", "check", "condense", "draw", "report"]

CURVES = ("steps", "reward", "spread", "length", "training_reward")
LAST = 3  # evaluations that make the final reward
STATED = {"sisa": "", "misa": " (not in the paper)", "sisa_lr": " (not in the paper)"}
GROWS = 2.0  # times the first reward: what shows that the preset `quick` learns


def condense(log: dict[str, Any]) -> Run:
    """Final and best reward, speed, and the curves."""
    rewards = [value for value in log["reward"] if value is not None]
    diverged = bool(log["diverged"][-1])
    return {
        **{name: log[name] for name in ("settings", "versions", "hardware", "seconds")},
        "diverged": diverged,
        "final": None if diverged else round(statistics.fmean(rewards[-LAST:]), 1),
        "best": round(max(rewards), 1),
        "steps_per_second": round(log["steps"][-1] / max(log["elapsed"][-1], 1e-9)),
        **{name: log[name] for name in CURVES},
    }


def by_task(results: Results) -> dict[tuple[str, str], dict[str, list[Run]]]:
    """Runs by task and algorithm, and by optimizer."""
    return curves.group(
        results, lambda run: (run["settings"]["task"], run["settings"]["algorithm"])
    )


def finals(runs: list[Run]) -> list[float]:
    """Of the runs that did not diverge."""
    return [run["final"] for run in runs if run["final"] is not None]


def check(results: Results) -> list[Check]:
    """Hold the rewards against the paper: SISA's is above Adam's everywhere. Ask it of ours too.

    Of the preset `quick` only that every optimizer learns.
    """
    if results["config"]["epoch_steps"] < PRESETS["paper"].epoch_steps:
        return list(map(grows, results["runs"].values()))
    checks = []
    for (task, algorithm), found in by_task(results).items():
        for name, stated in STATED.items():
            if all(finals(found.get(each, [])) for each in (name, "adam")):
                ours, adam = (statistics.fmean(finals(found[each])) for each in (name, "adam"))
                checks.append(
                    Check(
                        panel(task, algorithm),
                        f"{title(name)} above Adam{stated}",
                        f"{ours:,.0f} and {adam:,.0f}",
                        ours > adam and not any(run["diverged"] for run in found[name]),
                    )
                )
    return checks


def grows(run: Run) -> Check:
    first, last = run["reward"][0], run["final"]
    learns = last is not None and last >= GROWS * first
    here = "diverged" if last is None else f"{first:.0f} to {last:.0f}"
    settings = run["settings"]
    return Check(
        f"{panel(settings['task'], settings['algorithm'])}, {title(settings['choice']['label'])}",
        f"the reward grows {GROWS:g}-fold",
        here,
        learns,
    )


def panel(task: str, algorithm: str) -> str:
    return f"{TASKS[task].title}, {algorithm.upper()}"


def draw(results: Results, path: Path) -> None:
    """Reward against steps, a panel per task."""
    panels = [
        Panel(panel(*key), "reward", found, "steps", "reward")
        for key, found in by_task(results).items()
    ]
    columns = 2 if len(panels) % 2 == 0 else 1
    rows = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    curves.draw(rows, path, "rl", "environment steps")


def report(results: Results) -> str:
    """All tables."""
    episodes = results["config"]["episodes"]
    parts = [
        f"Rewards of {episodes} episodes, mean over the last {LAST} evaluations, then mean and "
        "standard deviation over seeds. *Best* is the best evaluation of each seed. Settings are "
        "the paper's row for SISA, Tianshou's for Adam, and Adam's learning rate for the others: "
        "nothing was tuned.",
    ]
    for key, found in by_task(results).items():
        parts += [f"**{panel(*key)}**", rewards(found)]
    parts += ["**Statements**:", table(check(results)), made_with(results)]
    return "\n\n".join(parts) + "\n"


def rewards(found: dict[str, list[Run]]) -> str:
    lines = []
    for label, runs in found.items():
        diverged = sum(run["diverged"] for run in runs)
        lines.append(
            [
                *(title(label), describe(runs[0]["settings"])),
                f"{len(runs)}" + (f" ({diverged} diverged)" if diverged else ""),
                f"{max(run['steps'][-1] for run in runs):,}",
                mean_sd((run["reward"][0] for run in runs), 0),
                f"**{mean_sd(finals(runs), 0)}**",
                mean_sd((run["best"] for run in runs), 0),
            ]
        )
    return markdown(["", "settings", "seeds", "steps", "at first", "at the end", "best"], lines)


def made_with(results: Results) -> str:
    runs = list(results["runs"].values())
    versions = {
        name: ", ".join(dict.fromkeys(run["versions"].get(name) or "-" for run in runs))
        for name in ("torch", "tianshou", "gymnasium", "mujoco")
    }
    processors = ", ".join(dict.fromkeys(run["hardware"]["cpu"] for run in runs))
    missing = len(results.get("missing", []))
    done = f"{len(runs)} of {len(runs) + missing} runs" if missing else f"{len(runs)} runs"
    return (
        f"{done} on one core each, {min(run['steps_per_second'] for run in runs):,} to "
        f"{max(run['steps_per_second'] for run in runs):,} environment steps a second; "
        f"{processors}; {', '.join(f'{name} {value}' for name, value in versions.items())}."
    )
