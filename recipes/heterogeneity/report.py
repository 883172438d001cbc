"""The results as Markdown: accuracies beside the paper's, rounds, costs and settings."""

from collections.abc import Iterable, Sequence
from typing import Any

from recipes.grid import short
from recipes.heterogeneity.cells import Cell, Summary, cells
from recipes.heterogeneity.check import check
from recipes.heterogeneity.config import ALGORITHMS, DATASETS
from recipes.heterogeneity.paper import TABLE
from recipes.recipe import Results, table

__all__ = ["report"]

Found = dict[Cell, dict[str, Summary]]


def report(results: Results) -> str:
    """All tables."""
    found = cells(results)
    papers = {cell: row for cell, row in found.items() if cell in TABLE}
    parts = [
        "Accuracy in % on the test data in the **best round**, as the published script reports it: "
        f"{over_seeds(results)}{', in brackets that of the paper' if papers else ''}. FedSGD "
        "and MISA are ours: FedAvg with one gradient of all local data per round, which costs what "
        "SISA costs, and a consensus by singular values, which costs the same.",
        accuracies(found),
        "In the **last round**:",
        by_cell(found, lambda cell, name, summary: str(summary.last)),
    ]
    if papers:
        parts += [
            "**Rounds until the accuracy that the paper has for SISA**, mean over the seeds that "
            "reach it; in brackets how many do, if not all.",
            by_cell(papers, rounds_needed),
        ]
    parts += ["**Settings and costs** of a run, all clients together:", costs(found)]
    parts += ["**Statements**, held against the best round where they do not say which:"]
    parts += [table(check(results)), made_with(results)]
    return "\n\n".join(parts) + "\n"


def accuracies(found: Found) -> str:
    """The best of a row in bold."""

    def entry(cell: Cell, name: str, summary: Summary) -> str:
        top = max(other.best.mean for other in found[cell].values())
        text = f"**{summary.best}**" if summary.best.mean == top else f"{summary.best}"
        paper = TABLE.get(cell, {}).get(name)
        return text if paper is None else f"{text} ({paper:.2f})"

    return by_cell(found, entry)


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
