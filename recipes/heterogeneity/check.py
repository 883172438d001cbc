"""The statements of Table 2 and its section, held against the results.

The paper's statements compare accuracies of the best round, as its script does; ours, "not in the
paper", those of the last round. All are means over the seeds. A cell with a missing run makes no
statement about it.
"""

from collections.abc import Iterator

from recipes.heterogeneity.cells import Cell, Summary, cell_title, cells
from recipes.heterogeneity.config import ALGORITHMS
from recipes.heterogeneity.paper import BASELINES, TABLE
from recipes.recipe import Check, Results

__all__ = ["check"]

LAST_ROUND = 97.5  # what MNIST with one label per client is expected to end with, here
SOON = 150  # rounds
LEARNS = 90.0  # what shows that the preset `quick` works


def check(results: Results) -> list[Check]:
    """All statements about what there is."""
    return [
        statement for cell, row in cells(results).items() for statement in about_cell(cell, row)
    ]


def about_cell(cell: Cell, row: dict[str, Summary]) -> Iterator[Check]:
    paper = TABLE.get(cell)
    if paper is None:
        # Not the paper's data, so none of its statements.
        if "sisa" in row:
            yield from about_other_data(cell, row["sisa"])
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
    yield from above(cell, row, "sisa", beaten, "best", "SISA is above")
    if not set(BASELINES) - set(row):
        yield Check(
            cell_title(cell),
            "baselines reach " + listed({name: f"{paper[name]:.2f}" for name in BASELINES}),
            listed({name: f"{row[name].best}" for name in BASELINES}),
            all(row[name].best.mean >= paper[name] for name in BASELINES),
        )
    ours = "(not in the paper) in the last round MISA is above"
    yield from above(cell, row, "misa", list(BASELINES), "last", ours)
    if cell == ("mnist", 1) and "sisa" in row:
        yield from about_one_label(cell, row["sisa"], paper["sisa"])


def above(
    cell: Cell, row: dict[str, Summary], name: str, others: list[str], column: str, claim: str
) -> Iterator[Check]:
    """State that an algorithm beats all others by the mean of `column`, `best` or `last`."""
    if {name, *others} - set(row):
        return
    found = {each: row[each].spread(column) for each in (name, *others)}
    rest = listed({other: f"{found[other]}" for other in others})
    yield Check(
        cell_title(cell),
        f"{claim} {', '.join(ALGORITHMS[other] for other in others)}",
        f"{ALGORITHMS[name]} {found[name]}; {rest}",
        all(found[name].mean > found[other].mean for other in others),
    )


def about_other_data(cell: Cell, sisa: Summary) -> Iterator[Check]:
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {LEARNS:g} % in the last round",
        f"{sisa.last} %",
        sisa.last.mean >= LEARNS,
    )


def about_one_label(cell: Cell, sisa: Summary, goal: float) -> Iterator[Check]:
    last = sisa.last
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {LAST_ROUND} % in the last round",
        f"{last} %",
        last.mean >= LAST_ROUND,
    )
    late = [run for run in sisa.runs if run["reached"] is None or run["reached"] > SOON]
    yield Check(
        cell_title(cell),
        f"(not in the paper) SISA has {goal} % within {SOON} rounds, with every seed",
        f"after {', '.join(map(str, sisa.reached)) or 'no'} rounds",
        not late,
    )


def listed(values: dict[str, str]) -> str:
    return ", ".join(f"{ALGORITHMS[name]} {value}" for name, value in values.items())
