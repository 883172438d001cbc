"""Results: condensed runs, statements, picture, tables, and the choice among trials."""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.budgets.config import CHOSEN, TITLES, TRIALS, TWICE
from recipes.grid import format_value
from recipes.heterogeneity.cells import Cell, Summary, cell_title
from recipes.heterogeneity.run import condense as condense_curve
from recipes.recipe import Check, Results, read_results
from recipes.style import COLOURS, INK, figure_style
from recipes.tables import checks_table, markdown, provenance

__all__ = ["OURS", "check", "choose", "condense", "draw", "main", "report"]

OURS = ("misa", "misa_local")
CELLS_AHEAD = 8  # of the ten
LEARNED = 90.0  # what shows that the preset `quick` works

Rows = dict[Cell, dict[str, Summary]]


def condense(log: dict[str, Any]) -> dict[str, Any]:
    """Return what the other recipe keeps, and the mean accuracy over all rounds."""
    return {
        **condense_curve(log),
        "area": round(statistics.fmean(log["accuracy"][1:] or log["accuracy"]), 2),
    }


def rows(results: Results, *, rounds: Callable[[str], int]) -> Rows:
    """Return the runs by cell and algorithm that have the number of rounds that `rounds` says."""
    table: dict[Cell, dict[str, list[dict[str, Any]]]] = {}
    for run in results["runs"].values():
        settings = run["settings"]
        name = settings["algorithm"]
        if settings["rounds"] == rounds(name):
            cell = settings["dataset"], settings["labels"]
            table.setdefault(cell, {}).setdefault(name, []).append(run)
    order = [tuple(cell) for cell in results["config"]["cells"]]
    return {
        cell: {name: Summary(tuple(table[cell][name])) for name in TRIALS if name in table[cell]}
        for cell in order
        if cell in table
    }


def by_rounds(results: Results) -> Rows:
    """Return the runs at equal rounds, which is equal sample gradients."""
    return rows(results, rounds=lambda name: results["config"]["rounds"])


def by_bytes(results: Results) -> Rows:
    """Return the runs at equal bytes: half of the rounds for those who send twice as much."""
    full = results["config"]["rounds"]
    return rows(results, rounds=lambda name: full // 2 if name in TWICE else full)


def check(results: Results) -> list[Check]:
    """Check where MISA is ahead of every rival, in the last round."""
    if results["config"]["trials"]:
        return []
    budgets = {"equal rounds and sample gradients": by_rounds(results)}
    if results["config"]["half"]:
        budgets["equal bytes"] = by_bytes(results)
    checks = []
    for budget, table in budgets.items():
        ahead = []
        for cell, row in table.items():
            if set(results["config"]["algorithms"]) <= set(row):
                checks.append(check_cell(f"{cell_title(cell)}, {budget}", row))
                ahead.append(checks[-1].holds)
        if len(ahead) >= CELLS_AHEAD:
            checks.append(
                Check(
                    budget,
                    f"MISA is ahead of every rival in at least {CELLS_AHEAD} cells",
                    f"in {sum(ahead)} of {len(ahead)}",
                    sum(ahead) >= CELLS_AHEAD,
                )
            )
    if not checks and len(by_rounds(results)) == 1:
        ((cell, row),) = by_rounds(results).items()
        last = row["misa"].last
        title = cell_title(cell)
        checks = [Check(title, f"MISA has {LEARNED:g} %", f"{last} %", last.mean >= LEARNED)]
    return checks


def check_cell(panel: str, row: dict[str, Summary]) -> Check:
    """Compare our best with the best rival."""
    ours = [name for name in OURS if name in row]
    rivals = [name for name in row if name not in OURS]
    best, rival = (max(names, key=lambda name: row[name].last.mean) for names in (ours, rivals))
    return Check(
        panel,
        "MISA is ahead of every rival in the last round",
        f"{TITLES[best]} {row[best].last}; {TITLES[rival]} {row[rival].last}",
        row[best].last.mean > row[rival].last.mean,
    )


def draw(results: Results, path: Path) -> None:
    """Draw the mean accuracy against rounds, a panel per cell."""
    from matplotlib.figure import Figure

    table = by_rounds(results)
    columns = min(4, len(table))
    lines = -(-len(table) // columns)
    styles = dict(zip(TRIALS, [(c, s) for s in ("-", (0, (4, 1))) for c in COLOURS], strict=False))
    styles |= {"misa": (INK, "-"), "misa_local": (INK, (0, (4, 1)))}
    with figure_style("budgets"):
        figure = Figure((2.6 * columns + 0.6, 2.1 * lines + 0.9), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False)
        handles: dict[str, Any] = {}
        for axes in grid.flat[len(table) :]:
            axes.set_axis_off()
        for axes, (cell, row) in zip(grid.flat, table.items(), strict=False):
            for name, summary in row.items():
                colour, line = styles[name]
                width = 2.0 if name in OURS else 1.0
                curve = summary.curve()
                (handles[name],) = axes.plot(*curve, color=colour, ls=line, lw=width)
            ends = [summary.last.mean for summary in row.values()]
            axes.set_ylim(min(0.98 * max(ends) - 20, min(ends)), None)
            axes.set_title(cell_title(cell), fontsize=9)
            axes.set_xlim(left=0)
            axes.grid(color=INK, alpha=0.2, lw=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        names = [name for name in TRIALS if name in handles]
        figure.legend(
            [handles[name] for name in names],
            [TITLES[name] for name in names],
            loc="outside upper center",
            ncols=6,
            frameon=False,
        )
        figure.supxlabel("rounds", fontsize=9)
        figure.supylabel("accuracy, %", fontsize=9)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def report(results: Results) -> str:
    """Return all tables."""
    config = results["config"]
    if config["trials"]:
        return trials_report(results)
    each = f"{config['samples_per_round']} samples of every client in each of {config['rounds']}"
    parts = [
        f"Test accuracy in % in the **last round**: equal rounds and equal sample gradients, {each}"
        " rounds. Mean ± standard deviation over seeds, and the best in bold.",
        cell_table(by_rounds(results), "last"),
    ]
    if config["half"]:
        twice = [name for name in TWICE if name in config["algorithms"]]
        parts += [
            f"**Equal bytes**: {join_titles(twice)} send twice as much and have half of the "
            "rounds; the others are those above.",
            cell_table(by_bytes(results), "last"),
        ]
    parts += [
        "**Area under the curve**: the mean accuracy over all evaluations.",
        cell_table(by_rounds(results), "area"),
        "In the **best round**, chosen on the test data, as in the paper:",
        cell_table(by_rounds(results), "best"),
        "**Settings**, and what a run costs all clients together:",
        settings_table(by_rounds(results)),
        "**Statements**:",
        checks_table(check(results), "expected"),
        provenance(results),
    ]
    return "\n\n".join(parts) + "\n"


def cell_table(table: Rows, column: str) -> str:
    names = [name for name in TRIALS if any(name in row for row in table.values())]
    lines = []
    for cell, row in table.items():
        top = max(summary.spread(column).mean for summary in row.values())
        spreads = {name: row[name].spread(column) for name in names if name in row}
        entries = {
            name: f"**{spread}**" if spread.mean == top else f"{spread}"
            for name, spread in spreads.items()
        }
        seeds = "/".join(str(n) for n in sorted({len(summary.runs) for summary in row.values()}))
        lines.append([cell_title(cell), seeds, *(entries.get(name, "-") for name in names)])
    return markdown(["data", "seeds", *(TITLES[name] for name in names)], lines)


def settings_table(table: Rows) -> str:
    (_, row), *_ = table.items()
    lines = []
    for name, summary in row.items():
        run = summary.runs[0]
        settings = run["settings"]
        lines.append(
            [
                TITLES[name],
                describe(settings),
                f"{run['samples']:,}",
                f"{run['bytes_up'] / 1e6:,.0f}",
                f"{run['bytes_down'] / 1e6:,.0f}",
            ]
        )
    return markdown(["", "settings", "sample gradients", "MB up", "MB down"], lines)


def describe(settings: dict[str, Any]) -> str:
    options = (f"{name} {format_value(value)}" for name, value in settings["options"].items())
    steps = settings["steps"]
    return f"{', '.join(options)}; {steps} x {settings['batch_size']} samples"


def trials_report(results: Results) -> str:
    """Return the accuracies of all trials as a table."""
    lines = []
    for name in TRIALS:
        accuracies = trial_accuracies(results, name)
        known = [value for value in accuracies if value is not None]
        if known:
            cells = ["-" if value is None else f"{value:.2f}" for value in accuracies]
            best = accuracies.index(max(known))
            cells[best] = f"**{cells[best]}**"
            lines.append([TITLES[name], *cells])
    text = (
        "Validation accuracy in % in the last round of every trial; "
        "`recipes/budgets/config.py` has them under `TRIALS`. What ends highest, in bold, goes on."
    )
    heads = ["", *(str(number + 1) for number in range(len(TRIALS["misa"])))]
    return f"{text}\n\n{markdown(heads, lines)}\n\n{provenance(results)}\n"


def trial_accuracies(results: Results, name: str) -> list[float | None]:
    """Return the last accuracy of every trial of an algorithm, None for one that was not run."""
    accuracies: list[float | None] = []
    for number in range(len(TRIALS[name])):
        ending = f"_{name}_seed{results['config']['seed']}_rounds{results['config']['rounds']}"
        found = [
            run["last"] if run["round"][-1] == run["settings"]["rounds"] else 0.0
            for label, run in results["runs"].items()
            if label.endswith(f"{ending}_trial{number}")
        ]
        accuracies.append(statistics.fmean(found) if found else None)
    return accuracies


def choose(results: Results) -> dict[str, dict[str, Any]]:
    """Return the best trial of every algorithm that had all of its trials."""
    chosen = {}
    for name in TRIALS:
        accuracies = [value for value in trial_accuracies(results, name) if value is not None]
        if len(accuracies) == len(TRIALS[name]):
            best = accuracies.index(max(accuracies))
            chosen[name] = {"trial": best, "accuracies": accuracies}
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m recipes budgets choose", description="Choose settings from trials"
    )
    parser.add_argument("trials", type=Path, help="results of the preset trials, a JSON file")
    parser.add_argument("--out", type=Path, default=CHOSEN, help="default: chosen.json here")
    args = parser.parse_args(argv)
    try:
        results = read_results("trials", args.trials, "budgets")
    except ValueError as error:
        parser.error(str(error))
    if not results["config"].get("trials"):
        parser.error(f"trials must be results of a preset of trials, got {args.trials}")
    chosen = choose(results)
    before = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    saved = {**before, results["config"]["chosen"]: chosen}
    args.out.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    for name, entry in chosen.items():
        print(f"{name}: trial {entry['trial'] + 1} of {entry['accuracies']}")


def join_titles(names: Sequence[str]) -> str:
    return ", ".join(TITLES[name] for name in names)
