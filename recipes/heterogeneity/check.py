"""The statements of Table 2 and its section, compared with the results.

The paper's statements compare accuracies of the best round, as its script does; ours, "not in the
paper", those of the last round. All are means over the seeds. A cell with a missing run makes no
statement about it.
"""

from collections.abc import Iterator

from recipes.heterogeneity.cells import Cell, Summary, cell_title, cells
from recipes.heterogeneity.config import ALGORITHMS, RIVALS
from recipes.heterogeneity.paper import BASELINES, TABLE
from recipes.recipe import Check, Results

__all__ = ["check"]

LAST_ROUND_ACCURACY = 97.5  # what MNIST with one label per client is expected to end with, here
EARLY_ROUNDS = 150  # rounds
QUICK_ACCURACY = 90.0  # what shows that the preset `quick` works


def check(results: Results) -> list[Check]:
    """Check all statements for which there are runs."""
    return [
        statement for cell, row in cells(results).items() for statement in check_cell(cell, row)
    ]


def check_cell(cell: Cell, row: dict[str, Summary]) -> Iterator[Check]:
    paper = TABLE.get(cell)
    if paper is None:
        # Not the paper's data, so none of its statements.
        if "sisa" in row:
            yield from check_other_data(cell, row["sisa"])
        return
    if "sisa" in row:
        best = row["sisa"].best
        yield Check(
            cell_title(cell),
            f"SISA reaches {paper['sisa']:.2f} %",
            f"{best} % in the best round, {row['sisa'].last} % in the last",
            best.mean >= paper["sisa"],
        )
    beaten = [name for name in BASELINES if paper[name] < paper["sisa"]]
    yield from check_above(cell, row, "sisa", beaten, "best", "SISA is above")
    if not set(BASELINES) - set(row):
        yield Check(
            cell_title(cell),
            "baselines reach " + join_values({name: f"{paper[name]:.2f}" for name in BASELINES}),
            join_values({name: f"{row[name].best}" for name in BASELINES}),
            all(row[name].best.mean >= paper[name] for name in BASELINES),
        )
    ours = "(not in the paper) in the last round MISA is above"
    yield from check_above(cell, row, "misa", list(BASELINES), "last", ours)
    rivals = [name for name in RIVALS if name in row]
    if rivals:
        yield from check_above(cell, row, "misa", rivals, "last", ours)
    if cell == ("mnist", 1) and "sisa" in row:
        yield from check_one_label(cell, row["sisa"], paper["sisa"])


def check_above(
    cell: Cell, row: dict[str, Summary], name: str, others: list[str], column: str, claim: str
) -> Iterator[Check]:
    """Check that an algorithm beats all others by the mean of `column`, `best` or `last`."""
    if {name, *others} - set(row):
        return
    spreads = {algorithm: row[algorithm].spread(column) for algorithm in (name, *others)}
    rest = join_values({other: f"{spreads[other]}" for other in others})
    yield Check(
        cell_title(cell),
        f"{claim} {', '.join(ALGORITHMS[other] for other in others)}",
        f"{ALGORITHMS[name]} {spreads[name]}; {rest}",
        all(spreads[name].mean > spreads[other].mean for other in others),
    )


def check_other_data(cell: Cell, sisa: Summary) -> Iterator[Check]:
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {QUICK_ACCURACY:g} % in the last round",
        f"{sisa.last} %",
        sisa.last.mean >= QUICK_ACCURACY,
    )


def check_one_label(cell: Cell, sisa: Summary, goal: float) -> Iterator[Check]:
    last = sisa.last
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {LAST_ROUND_ACCURACY} % in the last round",
        f"{last} %",
        last.mean >= LAST_ROUND_ACCURACY,
    )
    late = [run for run in sisa.runs if run["reached"] is None or run["reached"] > EARLY_ROUNDS]
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {goal} % within {EARLY_ROUNDS} rounds, with every seed",
        f"after {', '.join(map(str, sisa.reached)) or 'no'} rounds",
        not late,
    )


def join_values(values: dict[str, str]) -> str:
    return ", ".join(f"{ALGORITHMS[name]} {value}" for name, value in values.items())
