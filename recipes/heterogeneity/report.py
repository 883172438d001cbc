"""The results as Markdown: accuracies beside the paper's, rounds, costs and settings."""

import json
from collections.abc import Iterable
from typing import Any

from recipes.grid import format_value
from recipes.heterogeneity.cells import Cell, Summary, cells
from recipes.heterogeneity.check import check
from recipes.heterogeneity.config import ALGORITHMS, DATASETS, tuning
from recipes.heterogeneity.paper import BASELINES, TABLE
from recipes.recipe import Results
from recipes.tables import checks_table, markdown, provenance

__all__ = ["report"]

Table = dict[Cell, dict[str, Summary]]


def report(results: Results) -> str:
    """Return all tables."""
    table = cells(results)
    papers = {cell: row for cell, row in table.items() if cell in TABLE}
    parts = [
        f"Test accuracy in % in the **last round**, {over_seeds(results)}. FedSGD and MISA are "
        "ours: FedAvg with one gradient of all local data per round, and a consensus by singular "
        "values.",
        cell_table(table, lambda cell, name, summary: bold(table[cell], summary, "last")),
        "In the **best round** of the same runs. It is chosen on the test data, as the published "
        "script does, and so flatters algorithms whose accuracy swings"
        f"{'; in brackets the number of the paper' if papers else ''}.",
        cell_table(table, best_beside_paper),
    ]
    if "fedavg" in next(iter(table.values())):
        parts += [
            "**Gradients of single samples per round**, all clients together:",
            cell_table(table, lambda cell, name, summary: f"{summary.samples_per_round:,.0f}"),
            "**At equal sample gradients**: accuracy in the last saved round that costs at most "
            "what all rounds of FedAvg cost; that round in brackets. Settings were chosen for "
            "whole runs, not for this.",
            cell_table(table, lambda cell, name, summary: at_equal_samples(table[cell], summary)),
        ]
    counts = trial_counts()
    if counts.keys() & table.keys():
        parts += [
            "**Trials** on validation data from which settings were chosen. They are not equal in "
            f"number, and {single_seed_trials()} of them had one seed. {server_lr_remark()}",
            cell_table(table, lambda cell, name, summary: str(counts.get(cell, {}).get(name, 0))),
        ]
    if papers:
        parts += [
            "**Rounds until the accuracy that the paper has for SISA**, mean over the seeds that "
            "reach it; in brackets how many do, if not all.",
            cell_table(papers, rounds_needed),
        ]
    parts += ["**Settings and costs** of a run, all clients together:", costs(table)]
    parts += [
        "**Statements**: the paper's are held against the best round, ours against the last.",
        *(checks_table(check(results)), provenance(results)),
    ]
    return "\n\n".join(parts) + "\n"


def trial_counts() -> dict[Cell, dict[str, int]]:
    """Return the number of trials that settings were chosen from, by cell and algorithm."""
    counts: dict[Cell, dict[str, int]] = {}
    for entry in tuning():
        cell = counts.setdefault((entry["dataset"], entry["labels"]), {})
        cell[entry["algorithm"]] = entry["count"]
    return counts


def single_seed_trials() -> str:
    """Return the number of trials with one seed as text, such as "415 of 647"."""
    seeds: dict[str, set[int]] = {}
    names: list[str] = []
    for entry in tuning():
        for trial in entry["trials"]:
            settings = trial["settings"]
            names.append(json.dumps({**settings, "seed": None}, sort_keys=True))
            seeds.setdefault(names[-1], set()).add(settings["seed"])
    return f"{sum(len(seeds[name]) == 1 for name in names)} of {len(names)}"


def server_lr_remark() -> str:
    """Return a remark on baselines whose server learning rate was not tuned, or ""."""
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


def bold(row: dict[str, Summary], summary: Summary, column: str) -> str:
    """Return mean and deviation of a column, in bold if it has the largest mean of the row."""
    spread = summary.spread(column)
    top = max(row[name].spread(column).mean for name in ALGORITHMS if name in row)
    return f"**{spread}**" if spread.mean == top else f"{spread}"


def at_equal_samples(row: dict[str, Summary], summary: Summary) -> str:
    """Return the accuracy after as many samples as FedAvg uses in all its rounds."""
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


def cell_table(table: Table, entry: Any) -> str:
    """Return a table with a row per cell and a column per algorithm."""
    lines = []
    names = [name for name in ALGORITHMS if any(name in row for row in table.values())]
    for cell, row in table.items():
        entries = (entry(cell, name, row[name]) if name in row else "" for name in names)
        lines.append([DATASETS[cell[0]], cell[1], *entries])
    return markdown(["data", "labels", *(ALGORITHMS[name] for name in names)], lines)


def costs(table: Table) -> str:
    """Return settings and costs by data set; the number of labels hardly changes them."""
    lines = []
    for dataset, name, runs in by_dataset(table):

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
    words = (f"{name} {format_value(value)}" for name, value in settings["options"].items())
    options = ", ".join(words)
    epochs, size = settings["epochs"], settings["batch_size"]
    if not epochs:
        return f"{options}; one gradient of all local data"
    return f"{options}; {epochs:g} epoch{'s' if epochs > 1 else ''} of mini-batches of {size}"


def by_dataset(table: Table) -> Iterable[tuple[str, str, list[dict[str, Any]]]]:
    """Yield the runs of each data set and algorithm, for all numbers of labels together."""
    for dataset in dict.fromkeys(cell[0] for cell in table):
        rows = [row for cell, row in table.items() if cell[0] == dataset]
        for name in ALGORITHMS:
            runs = [run for row in rows if name in row for run in row[name].runs]
            if runs:
                yield dataset, name, runs


def over_seeds(results: Results) -> str:
    seeds = results["config"]["seeds"]
    return f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
