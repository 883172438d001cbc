"""Markdown tables and pictures from saved results of `python -m benchmarks step`.

    python -m benchmarks figure docs/results/step_*.json

One file per model and device. Beside the first of them it writes `step.md`, which the page on speed
includes, and a picture per device, which `step.md` shows; `--name` names them otherwise.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.saved import read_saved
from benchmarks.shapes import MODELS
from benchmarks.step import REFERENCES

__all__ = ["draw", "main", "markdown"]

ADAMW = REFERENCES[0]
OURS, OTHERS, INK = "#2b83ba", "#9b9b9b", "#808080"  # readable on white and on black
Result = dict[str, Any]
Row = dict[str, Any]


def markdown(results: list[Result], picture: str) -> str:
    """Return tables of the results of one device, with a column per model."""
    first = results[0]
    speeds = ", ".join(f"{r['config']['model']} {r['copy_gb_per_s']:,.0f}" for r in results)
    where = machine(first)
    others = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    if first["hardware"]["gpu"] is None:
        threads = (f"{r['config']['model']} {r['config']['threads']}" for r in results)
        others += f". Threads: {', '.join(threads)}"
    everything = [name for name in measured(results) if not matrices_only(results, name)]
    matrices = [name for name in measured(results) if matrices_only(results, name)]
    parts = [
        f"### {where}",
        f"Float32, {others}. A copy moves, in GB/s, {speeds}.",
        f"![Step time relative to AdamW fused, {where}]({picture})",
        f"All parameters: milliseconds per step, and in brackets the ratio to {ADAMW}.",
        times(results, everything, to_adamw),
    ]
    moving = [n for n in everything if any(r.get("copy_share") for r in rows_named(results, n))]
    parts += [
        "Bytes that the step must read and write, in % of what a copy moves in that time.",
        grid(results, moving, lambda _, row: f"{100 * row['copy_share']:.0f}"),
    ]
    if matrices:
        parts += [
            "Hidden matrices and convolution kernels only: milliseconds per step, and in brackets "
            "the ratio to the fastest of the other libraries that were measured, which is "
            f"{fastest_others(results)}.",
            times(results, matrices, to_fastest_other),
        ]
    remarks = notes(results)
    if remarks:
        parts.append("\n".join(remarks))
    return "\n\n".join(parts) + "\n"


def machine(result: Result) -> str:
    """Return the name of the GPU or CPU that a result was measured on."""
    return str(result["hardware"]["gpu"] or result["hardware"]["cpu"])


def measured(results: list[Result]) -> list[str]:
    """Return the names of the rows that have a time for some model, in the order of the results."""
    rows = [row for result in results for row in result["rows"]]
    return list(dict.fromkeys(row["name"] for row in rows if row["error"] is None))


def rows_named(results: Iterable[Result], name: str) -> list[Row]:
    """Return the rows with a name."""
    return [row for result in results for row in result["rows"] if row["name"] == name]


def matrices_only(results: list[Result], name: str) -> bool:
    """Return True if a row leaves embeddings and vectors out."""
    return "vector" not in rows_named(results, name)[0]["kinds"]


def fastest_other(result: Result) -> Row | None:
    """Return the fastest row for matrices that is not ours."""
    others = [
        row
        for row in result["rows"]
        if row["error"] is None
        and "vector" not in row["kinds"]
        and not row["name"].startswith("torchpisa")
    ]
    return min(others, key=lambda row: row["ms"], default=None)


def fastest_others(results: list[Result]) -> str:
    """Return the names of the fastest others, each with its models."""
    models: dict[str, list[str]] = {}
    for result in results:
        row = fastest_other(result)
        if row is not None:
            models.setdefault(row["name"], []).append(result["config"]["model"])
    shown = [f"{name} for {', '.join(of)}" for name, of in models.items()]
    return "; ".join(shown) or "none"


def times(
    results: list[Result], of: list[str], ratio: Callable[[Result, Row], float | None]
) -> str:
    """Return a table of times with ratios, and of memory, which hardly depends on the device."""

    def cell(result: Result, row: Row) -> str:
        value = ratio(result, row)
        return f"{row['ms']:.3g}" + ("" if value is None else f" ({value:.2f})")

    def extent(key: str) -> dict[str, str]:
        cells = {}
        for name in of:
            values = [row[key] for row in rows_named(results, name) if row["error"] is None]
            ends = (min(values), max(values)) if values else ()
            cells[name] = " to ".join(dict.fromkeys(f"{end:.1f}" for end in ends)) or "–"
        return cells

    more = {
        "state, bytes per parameter": extent("state_bytes_per_parameter"),
        "temporaries, of the parameters' bytes": extent("temporary_share"),
    }
    return grid(results, of, cell, more)


def to_adamw(result: Result, row: Row) -> float | None:
    """Return the ratio to AdamW, timed in the same minutes."""
    ratio: float | None = row["ratios"].get(ADAMW)
    return ratio


def to_fastest_other(result: Result, row: Row) -> float | None:
    """Return the ratio to `fastest_other`."""
    other = fastest_other(result)
    return None if other is None else float(row["ms"]) / float(other["ms"])


def grid(
    results: list[Result],
    of: list[str],
    cell: Callable[[Result, Row], str],
    more: dict[str, dict[str, str]] | None = None,
) -> str:
    """Return a Markdown table: rows by name, a column per model, and `more` columns."""
    more = more or {}
    heads = ["", *(result["config"]["model"] for result in results), *more]
    lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|"]
    for name in of:
        cells = []
        for result in results:
            rows = [row for row in rows_named([result], name) if row["error"] is None]
            cells.append(cell(result, rows[0]) if rows else "–")
        cells += [column[name] for column in more.values()]
        shown = f"**{name}**" if name.startswith("torchpisa") else name
        lines.append(f"| {' | '.join([shown, *cells])} |")
    return "\n".join(lines)


def notes(results: list[Result]) -> list[str]:
    """Return a list of what failed or needs a remark; rows with the same share a line."""
    models: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for row in result["rows"]:
            for text in (row["note"], row["error"]):
                if text:
                    models.setdefault((row["name"], text), []).append(result["config"]["model"])
    names: dict[tuple[str, str], list[str]] = {}
    for (name, text), of_row in models.items():
        where = "" if len(of_row) == len(results) else f" ({', '.join(of_row)})"
        names.setdefault((where, text), []).append(name)
    return [f"- {'; '.join(rows)}{where}: {text}" for (where, text), rows in names.items()]


def draw(results: list[Result], path: Path) -> None:
    """Draw bars from 1, the time of AdamW fused; to the left is faster. One panel per model."""
    import matplotlib
    from matplotlib.figure import Figure

    shown = [name for name in measured(results) if name != ADAMW]
    shown.sort(key=lambda name: matrices_only(results, name))
    labels = [f"{name} *" if matrices_only(results, name) else name for name in shown]
    columns = min(3, len(results))
    lines = -(-len(results) // columns)
    size = (1.6 + 3.1 * columns, lines * (0.9 + 0.24 * len(shown)))
    # Glyphs as text, no date and fixed ids: small, and the same bytes for the same results.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "step", "font.size": 8, "text.color": INK}
    settings |= {f"{part}.color": INK for part in ("xtick", "ytick")}
    settings |= {"axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK}
    with matplotlib.rc_context(settings):
        figure = Figure(size, layout="constrained")
        panels = figure.subplots(lines, columns, sharey=True, sharex=True, squeeze=False)
        for axes, result in zip(panels.flat, results, strict=False):
            panel(axes, result, shown)
            axes.set_yticks(range(len(shown)), labels)
        for axes in list(panels.flat)[len(results) :]:
            axes.set_visible(False)
        figure.supxlabel("step time / AdamW fused, logarithmic; * hidden matrices only", fontsize=8)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def panel(axes: Any, result: Result, shown: list[str]) -> None:
    """Draw the bars of one model; a row without a time is left empty."""
    from matplotlib.ticker import LogLocator

    axes.set_xscale("log")
    for place, name in enumerate(shown):
        rows = [row for row in rows_named([result], name) if ADAMW in row.get("ratios", ())]
        if not rows:
            continue
        ratio = rows[0]["ratios"][ADAMW]
        colour = OURS if name.startswith("torchpisa") else OTHERS
        axes.barh(place, ratio - 1, left=1, color=colour, height=0.7)
        text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
        offset = {"xytext": (3, 0), "textcoords": "offset points"}
        axes.annotate(text, (max(ratio, 1), place), va="center", fontsize=7, **offset)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.axvline(1, color=INK, lw=0.8)
    count = result["config"]["parameters"]
    shown = f"{count / 1e6:,.0f}M" if count >= 1e6 else f"{count / 1e3:,.0f}k"
    axes.set_title(f"{result['config']['model']}, {shown} parameters")
    axes.margins(x=0.2)  # for the numbers
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks figure", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--out", type=Path, help="folder; by default that of the first file")
    parser.add_argument("--name", default="step", help="of the tables and pictures")
    args = parser.parse_args(argv)
    folder = args.out or args.files[0].parent
    order = list(MODELS)
    entries = {"config": dict, "rows": list, "copy_gb_per_s": float}
    try:
        results = [read_saved("files", path, "step --save", **entries) for path in args.files]
    except ValueError as error:
        parser.error(str(error))
    results.sort(key=lambda result: order.index(result["config"]["model"]))
    texts = []
    for device in ("cuda", "cpu"):
        of_device = [result for result in results if result["config"]["device"] == device]
        machines = dict.fromkeys(map(machine, of_device))
        if len(machines) > 1:
            parser.error(f"files for {device} must be of one machine, got {', '.join(machines)}")
        if of_device:
            picture = folder / f"{args.name}_{device}.svg"
            draw(of_device, picture)
            texts.append(markdown(of_device, f"results/{picture.name}"))
            print(picture)
    tables = folder / f"{args.name}.md"
    tables.write_text("\n".join(texts), encoding="utf-8")
    print(tables)
