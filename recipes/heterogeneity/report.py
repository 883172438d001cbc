"""The results as Markdown: accuracies beside the paper's, rounds, costs and settings."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from recipes.grid import short
from recipes.heterogeneity.cells import Cell, Summary, cells
from recipes.heterogeneity.check import check
from recipes.heterogeneity.config import ALGORITHMS, DATASETS, tuning
from recipes.heterogeneity.paper import BASELINES, TABLE
from recipes.recipe import Results, table

__all__ = ["overview", "report"]

Found = dict[Cell, dict[str, Summary]]


def report(results: Results) -> str:
    """All tables."""
    found = cells(results)
    papers = {cell: row for cell, row in found.items() if cell in TABLE}
    parts = [
        f"Test accuracy in % in the **last round**, {over_seeds(results)}. FedSGD and MISA are "
        "ours: FedAvg with one gradient of all local data per round, and a consensus by singular "
        "values.",
        by_cell(found, lambda cell, name, summary: bold(found[cell], summary, "last")),
        "In the **best round** of the same runs. It is chosen on the test data, as the published "
        "script does, and so flatters algorithms whose accuracy swings"
        f"{'; in brackets the number of the paper' if papers else ''}.",
        by_cell(found, best_beside_paper),
    ]
    if "fedavg" in next(iter(found.values())):
        parts += [
            "**Gradients of single samples per round**, all clients together:",
            by_cell(found, lambda cell, name, summary: f"{summary.samples_per_round:,.0f}"),
            "**At equal sample gradients**: accuracy in the last saved round that costs at most "
            "what all rounds of FedAvg cost; that round in brackets. Settings were chosen for "
            "whole runs, not for this.",
            by_cell(found, lambda cell, name, summary: at_equal_samples(found[cell], summary)),
        ]
    counts = trials()
    if counts.keys() & found.keys():
        parts += [
            "**Trials** on validation data from which settings were chosen. They are not equal in "
            f"number, and {with_one_seed()} of them had one seed. {about_server_lr()}",
            by_cell(found, lambda cell, name, summary: str(counts.get(cell, {}).get(name, 0))),
        ]
    if papers:
        parts += [
            "**Rounds until the accuracy that the paper has for SISA**, mean over the seeds that "
            "reach it; in brackets how many do, if not all.",
            by_cell(papers, rounds_needed),
        ]
    parts += ["**Settings and costs** of a run, all clients together:", costs(found)]
    parts += [
        "**Statements**: the paper's are held against the best round, ours against the last.",
        *(table(check(results)), made_with(results)),
    ]
    return "\n\n".join(parts) + "\n"


OVERVIEW = ("fedavg", "fedprox", "fednova", "scaffold", "sisa", "misa")


def overview(results: Results, datasets: Sequence[str]) -> str:
    """The table of the README: one label per client, last round, with costs and trials."""
    found = {dataset: cells(results)[dataset, 1] for dataset in datasets}
    lines = [
        [DATASETS[dataset], *(bold(row, row[name], "last", OVERVIEW) for name in OVERVIEW)]
        for dataset, row in found.items()
    ]
    for dataset, row in found.items():
        each = [at_equal_samples(row, row[name]) for name in OVERVIEW]
        lines.append([f"{DATASETS[dataset]}, equal sample gradients", *each])
    first = found[datasets[0]]
    each = [f"{first[name].samples_per_round:,.0f}" for name in OVERVIEW]
    lines.append([f"sample gradients per round, {DATASETS[datasets[0]]}", *each])
    counts = trials()
    each = [" / ".join(str(counts[d, 1][name]) for d in datasets) for name in OVERVIEW]
    lines.append([f"trials ({', '.join(DATASETS[d] for d in datasets)})", *each])
    return markdown(["", *(ALGORITHMS[name] for name in OVERVIEW)], lines)


def trials() -> dict[Cell, dict[str, int]]:
    """How many trials the settings of each algorithm in each cell were chosen from."""
    counts: dict[Cell, dict[str, int]] = {}
    for entry in tuning():
        cell = counts.setdefault((entry["dataset"], entry["labels"]), {})
        cell[entry["algorithm"]] = entry["count"]
    return counts


def with_one_seed() -> str:
    """Such as "415 of 647"."""
    seeds: dict[str, set[int]] = {}
    names: list[str] = []
    for entry in tuning():
        for trial in entry["trials"]:
            settings = trial["settings"]
            names.append(json.dumps({**settings, "seed": None}, sort_keys=True))
            seeds.setdefault(names[-1], set()).add(settings["seed"])
    return f"{sum(len(seeds[name]) == 1 for name in names)} of {len(names)}"


def about_server_lr() -> str:
    """Say whether the rate of the server was tried at all."""
    tried = {
        entry["algorithm"]
        for entry in tuning()
        for trial in entry["trials"]
        if trial["options"].get("server_lr", 1) != 1
    }
    missing = [ALGORITHMS[name] for name in BASELINES if name not in tried]
    if not missing:
        return ""
    return (
        f"No trial of {', '.join(missing)} varied the server's learning rate, `server_lr`, which "
        "was 1 throughout; Scaffold in particular may be better than this."
    )


def bold(
    row: dict[str, Summary], summary: Summary, column: str, among: Iterable[str] = ALGORITHMS
) -> str:
    """Mean and deviation of a column, in bold if nothing else in the row has a larger mean."""
    spread = summary.spread(column)
    top = max(row[name].spread(column).mean for name in among if name in row)
    return f"**{spread}**" if spread.mean == top else f"{spread}"


def at_equal_samples(row: dict[str, Summary], summary: Summary) -> str:
    """Accuracy when so many samples have been used as FedAvg uses in all its rounds."""
    fedavg = row["fedavg"]
    if summary.samples_per_round <= fedavg.samples_per_round:
        return f"{summary.last} ({summary.runs[0]['settings']['rounds']})"
    number = summary.rounds_within(fedavg.spread("samples").mean)
    return f"{summary.accuracy_at(number)} ({number})"


def best_beside_paper(cell: Cell, name: str, summary: Summary) -> str:
    paper = TABLE.get(cell, {}).get(name)
    return f"{summary.best}" if paper is None else f"{summary.best} ({paper:.2f})"


def rounds_needed(cell: Cell, name: str, summary: Summary) -> str:
    reached = summary.reached
    if not reached:
        return "never"
    mean = f"{sum(reached) / len(reached):.0f}"
    return mean if len(reached) == len(summary.runs) else f"{mean} ({len(reached)})"


def by_cell(found: Found, entry: Any) -> str:
    """A row per cell, a column per algorithm."""
    lines = []
    for cell, row in found.items():
        entries = (entry(cell, name, row[name]) if name in row else "" for name in ALGORITHMS)
        lines.append([DATASETS[cell[0]], cell[1], *entries])
    return markdown(["data", "labels", *ALGORITHMS.values()], lines)


def costs(found: Found) -> str:
    """By data set: the number of labels changes costs by rounding only."""
    lines = []
    for dataset, name, runs in by_dataset(found):

        def mean(column: str, unit: float = 1, runs: list[dict[str, Any]] = runs) -> float:
            return sum(run[column] for run in runs) / len(runs) / unit

        used = list(dict.fromkeys(describe(run["settings"]) for run in runs))
        lines.append(
            [
                *(DATASETS[dataset], ALGORITHMS[name], "; or ".join(used)),
                max(run["settings"]["rounds"] for run in runs),
                *(f"{mean('gradients'):,.0f}", f"{mean('samples', 1e6):,.2f}"),
                *(f"{mean('bytes_up', 1e6):,.1f}", f"{mean('bytes_down', 1e6):,.1f}"),
            ]
        )
    work = ["rounds", "local gradients", "samples, millions", "MB up", "MB down"]
    return markdown(["data", "", "settings", *work], lines)


def describe(settings: dict[str, Any]) -> str:
    options = ", ".join(f"{name} {short(value)}" for name, value in settings["options"].items())
    epochs, size = settings["epochs"], settings["batch_size"]
    if not epochs:
        return f"{options}; one gradient of all local data"
    return f"{options}; {epochs:g} epoch{'s' if epochs > 1 else ''} of mini-batches of {size}"


def by_dataset(found: Found) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    """The runs of each data set and algorithm, whatever the labels."""
    for dataset in dict.fromkeys(cell[0] for cell in found):
        rows = [row for cell, row in found.items() if cell[0] == dataset]
        for name in ALGORITHMS:
            runs = [run for row in rows if name in row for run in row[name].runs]
            if runs:
                yield dataset, name, runs


def over_seeds(results: Results) -> str:
    seeds = results["config"]["seeds"]
    return f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"


def made_with(results: Results) -> str:
    runs = list(results["runs"].values())
    devices = dict.fromkeys(run["hardware"]["gpu"] or run["hardware"]["cpu"] for run in runs)
    versions = dict.fromkeys(run["versions"]["torch"] for run in runs)
    minutes = sum(run["seconds"] for run in runs) / 60
    planned = len(runs) + len(results.get("missing", []))
    done = f"{len(runs)} runs" if planned == len(runs) else f"{len(runs)} of {planned} runs"
    return f"{done}, {minutes:.0f} minutes if added up; {', '.join(devices)}, torch " + (
        f"{', '.join(versions)}."
    )


def markdown(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)
