"""Time of one `opt.step()`: ours, torch's and other libraries'.

    python -m benchmarks step --device cuda --model gpt2-124m --save docs/results/FILE.json

Parameters and gradients are random and shared by all; no model runs. On a GPU a sample is the wall
time of back-to-back steps between two synchronisations, divided by their number, so that the host
counts where it is the slower one. On a CPU it is one step, or the mean of a round. Rows take turns.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment, peers, rows
from benchmarks.rows import LR, Row
from benchmarks.shapes import MODELS, parameters
from benchmarks.stopwatch import Copy, Entry, Problem, round_robin

__all__ = ["COLUMNS", "REFERENCES", "main", "table"]

COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
REFERENCES = [row.name for row in rows.REFERENCES]
COLUMNS = [
    *("optimizer", "ms", "iqr", "/AdamW fused", "/AdamW foreach", "/Muon"),
    *("state B/param", "temporary", "of copy"),
]


def run(args: argparse.Namespace, sets: list[list[Row]]) -> dict[str, Any]:
    """Measure all sets beside the references; save after each."""
    problem = Problem(args.model, args.device, args.seed)
    copy = Entry("copy")
    copy.optimizer = Copy(problem.device, COPY_BYTES[problem.device.type])
    copy.optimizer.step()
    copy.choose_steps(problem)
    selected = [row for members in sets for row in members]
    references = [Entry(row.name, row) for row in rows.REFERENCES if beside(row, selected)]
    for entry in references:
        prepare(entry, problem, args.cap)
    result = header(args, problem)
    done: list[dict[str, Any]] = []
    for number, members in enumerate(sets, start=1):
        entries = [Entry(row.name, row) for row in members]
        for entry in entries:
            prepare(entry, problem, args.cap)
        medians: dict[str, float] = {}
        turns = [entry for entry in references if entry.row and beside(entry.row, members)]
        # Not for the sake of rows that failed, unless a reference has nothing yet.
        if any(e.running for e in entries) or any(e.running and not e.samples for e in turns):
            print(f"set {number} of {len(sets)}: in turn, {args.repeats} times", flush=True)
            # The copy goes first: between steps it would empty the caches of small models.
            medians = round_robin([copy], args.repeats, problem)
            medians |= round_robin([*turns, *entries], args.repeats, problem)
        done += [describe(entry, medians, copy) for entry in entries]
        for entry in entries:
            entry.close()
        if any(row.compiles for row in members):  # not before: others may still need what they have
            torch.compiler.reset()
        pooled = {e.name: statistics.median(e.samples) for e in (copy, *references) if e.samples}
        result["copy_gb_per_s"] = rounded(copy.optimizer.moved / pooled[copy.name] / 1e6)
        result["rows"] = [*(describe(entry, pooled, copy) for entry in references), *done]
        # Only now are the libraries imported.
        result["versions"] = environment.versions(*(peers.LIBRARIES if args.peers else ()))
        if args.save:
            args.save.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def prepare(entry: Entry, problem: Problem, cap_s: float) -> None:
    """Warm up a row, and print the time it took or why it failed."""
    print(f"{entry.name}: ", end="", flush=True)
    entry.prepare(problem, cap_s)
    print(entry.error or f"warm after {entry.facts['warmup_s']} s", flush=True)


def beside(reference: Row, members: Sequence[Row]) -> bool:
    """Return True if a reference is measured beside some rows: Muon if they take matrices only."""
    return not reference.matrices_only or not members or any(row.matrices_only for row in members)


def header(args: argparse.Namespace, problem: Problem) -> dict[str, Any]:
    """Return configuration and hardware."""
    config = {
        "model": args.model,
        "parameters": parameters(problem.shapes),
        "tensors": len(problem.shapes),
        "device": args.device,
        "dtype": "float32",
        "repeats": args.repeats,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "lr": LR,
        "cap_s": args.cap,
        "copy_bytes": COPY_BYTES[problem.device.type],
    }
    return {"config": config, "hardware": environment.hardware(args.device)}


def describe(entry: Entry, medians: dict[str, float], copy: Entry) -> dict[str, Any]:
    """Return a row of the result, with its ratios to medians of the same time."""
    row, facts = entry.row, entry.facts
    assert row is not None
    about = {
        "name": entry.name,
        "library": row.library,
        "optimizer": row.optimizer,
        "settings": {k: v if isinstance(v, int | str) else str(v) for k, v in row.settings.items()},
        "kinds": list(row.kinds),
        "note": entry.note,
        "error": entry.error,
    }
    if entry.error is not None or entry.name not in medians:
        return {**about, "error": entry.error or "not measured, for want of rows beside it"}
    ms, count = medians[entry.name], facts["parameters"]
    # AdamW has all parameters; Muon is no measure for rows that have more than the matrices.
    ratios = {
        reference.name: ms / medians[reference.name]
        for reference in rows.REFERENCES
        if reference.name in medians and (row.matrices_only or not reference.matrices_only)
    }
    speed = row.moved * count / ms / 1e6 if row.moved else None
    copied = copy.optimizer.moved / medians[copy.name] / 1e6
    return {
        **about,
        "parameters": count,
        "tensors": facts["tensors"],
        "ms": rounded(ms),
        "iqr_ms": rounded(interquartile_range(entry.samples)),
        "samples_ms": [rounded(sample) for sample in entry.samples],
        "steps_per_sample": entry.steps,
        "warmup_s": facts["warmup_s"],
        "beside_ms": {name: rounded(medians[name]) for name in ratios},
        "ratios": {name: rounded(ratio) for name, ratio in ratios.items()},
        "state_bytes_per_parameter": rounded(facts["state_bytes"] / count),
        "temporary_bytes": facts["temporary_bytes"],
        "temporary_share": rounded(facts["temporary_bytes"] / (4 * count)),
        "moved_bytes_per_parameter": row.moved,
        "gb_per_s": None if speed is None else rounded(speed),
        "copy_share": None if speed is None else rounded(speed / copied),
    }


def interquartile_range(samples: list[float]) -> float:
    """Return the distance between the quartiles; 0 for one sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def rounded(value: float) -> float:
    """Round to five digits, more than the spread leaves."""
    return float(f"{value:.5g}")


def table(result: dict[str, Any]) -> str:
    """Return the result as plain text."""
    lines = [COLUMNS]
    for row in result["rows"]:
        if row["error"] is not None:
            lines.append([row["name"], row["error"]])
            continue
        ratios = [row["ratios"].get(name) for name in REFERENCES]
        lines.append(
            [
                row["name"] + (" *" if "vector" not in row["kinds"] else ""),
                *(f"{row[key]:.3f}" for key in ("ms", "iqr_ms")),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                f"{row['state_bytes_per_parameter']:.2f}",
                f"{row['temporary_share']:.2f}",
                "" if row["copy_share"] is None else f"{100 * row['copy_share']:.0f} %",
            ]
        )
    widths = [max(len(line[i]) for line in lines if len(line) > 2) for i in range(len(COLUMNS))]
    widths[0] = max(len(line[0]) for line in lines)
    text = [
        line[0].ljust(widths[0])
        + "".join(
            f"  {cell}" if len(line) == 2 else f"  {cell:>{width}}"
            for cell, width in zip(line[1:], widths[1:], strict=False)
        )
        for line in lines
    ]
    notes = [f"{row['name']}: {row['note']}" for row in result["rows"] if row["note"]]
    legend = [
        "",
        "* hidden matrices and kernels only; every other row has all parameters",
        "temporary: most that a step allocates, in units of its parameters' bytes",
        f"copy: {result['copy_gb_per_s']:.0f} GB/s read and written",
    ]
    return "\n".join([*text, *legend, *notes])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks step", description=_SUMMARY)
    shown = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="gpt2-124m", choices=MODELS, metavar="|".join(shown))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="rows with this in their names")
    parser.add_argument(
        "--together", action="store_true", help="all rows in turn, if memory has room for them"
    )
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cap", type=float, default=90.0, help="seconds to warm up a row")
    args = parser.parse_args(argv)
    if args.device not in COPY_BYTES:
        parser.error(f"--device must be cuda or cpu, got {args.device}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and there is none")
    for name in ("repeats", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save must be in a folder that exists, got {args.save}")
    if args.threads:
        torch.set_num_threads(args.threads)
    sets = select(args.only, args.peers)
    if args.together:
        sets = [[row for members in sets for row in members]]
    if args.only and not any(sets):
        parser.error(f"--only must be in the name of a row, got {' '.join(args.only)}")
    print(table(run(args, sets)))


def select(only: list[str] | None, with_peers: bool) -> list[list[Row]]:
    """Return the rows besides the references, in sets that are measured together."""
    sets = [*rows.TORCHPISA_ROWS, *([row] for row in peers.PEERS if with_peers)]
    if only is None:
        return sets
    names = [name.lower() for name in only]
    chosen = [[r for r in members if any(n in r.name.lower() for n in names)] for members in sets]
    if not any(chosen) and any(n in row.lower() for n in names for row in REFERENCES):
        return [[]]  # the references alone
    return [members for members in chosen if members]


_SUMMARY = (__doc__ or "").splitlines()[0]
