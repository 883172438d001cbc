"""The statements of Table 2 and its section, held against the results.

Like the paper's script, they compare accuracies of the best round, means over the seeds; those that
say "in the last round" do not. A cell of which a run is missing makes no statement about it.
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
    yield from above(cell, row, "sisa", [name for name in BASELINES if paper[name] < paper["sisa"]])
    if not set(BASELINES) - set(row):
        yield Check(
            cell_title(cell),
            "baselines reach " + listed({name: f"{paper[name]:.2f}" for name in BASELINES}),
            listed({name: f"{row[name].best}" for name in BASELINES}),
            all(row[name].best.mean >= paper[name] for name in BASELINES),
        )
    yield from above(cell, row, "misa", list(BASELINES))
    if cell == ("mnist", 1) and "sisa" in row:
        yield from about_one_label(cell, row["sisa"], paper["sisa"])


def above(cell: Cell, row: dict[str, Summary], name: str, others: list[str]) -> Iterator[Check]:
    """SISA beats those that it beats in the paper, MISA all of them."""
    if {name, *others} - set(row):
        return
    known = "" if name in TABLE[cell] else "(not in the paper) "
    yield Check(
        cell_title(cell),
        f"{known}{ALGORITHMS[name]} is above {', '.join(ALGORITHMS[other] for other in others)}",
        listed({name: f"{row[name].best};"}) + f" {listed({o: f'{row[o].best}' for o in others})}",
        all(row[name].best.mean > row[other].best.mean for other in others),
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
