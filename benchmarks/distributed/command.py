"""Step time and bytes on the wire of training on several processes, beside DDP and AdamW.

    python -m benchmarks distributed --processes 2 4 --out docs/results/distributed.json

Real processes on this host, one thread each, train a small transformer and talk over gloo. The rows
take turns: some steps of one, some of the next, again and again. A step is forward, backward and
step; the time is that of the slowest rank. `distributed-figure` makes tables and picture of FILE.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environment
from benchmarks.distributed.measure import MeasurementPlan, measure
from benchmarks.distributed.processes import start
from benchmarks.distributed.training import MODELS

__all__ = ["COLUMNS", "main", "table"]

SIZES = [4**exponent for exponent in range(4, 14)]  # 256 bytes to 64 MiB
COLUMNS = [
    *("optimizer", "ms", "iqr", "cpu ms", "/AdamW", "median of ratios"),
    *("handed B", "wire B", "state B"),
]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each number of processes; save after each."""
    plan = MeasurementPlan(args.model, args.steps, args.repeats, SIZES, args.seed)
    config = {**plan._asdict(), "size": MODELS[args.model]._asdict(), "dtype": "float32"}
    result: dict[str, Any] = {
        "config": {**config, "backend": "gloo", "threads_per_process": 1},
        "hardware": environment.hardware("cpu"),
        "versions": environment.versions(),
        "runs": [],
    }
    for processes in args.processes:
        result["runs"].append(start(measure, processes, plan))
        if args.out:
            args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def table(measured: dict[str, Any]) -> str:
    """Return the rows of one number of processes as plain text."""
    lines = [COLUMNS]
    for row in measured["rows"]:
        wire = row["wire_bytes"]
        lines.append(
            [
                row["name"],
                *(f"{row[key]:.1f}" for key in ("ms", "iqr_ms", "cpu_ms")),
                *(f"{row[key]:.3f}" for key in ("ratio_of_medians", "median_of_ratios")),
                f"{row['handed_bytes']:,.0f}",
                "" if wire is None else f"{wire:,.0f}",
                f"{row['state_bytes_per_parameter']:.1f}",
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = [
        line[0].ljust(widths[0])
        + "".join(f"  {cell:>{w}}" for cell, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
    sums = measured["all_reduce"]
    fitted = (
        f"all-reduce: latency {sums['alpha_s'] * 1e6:.1f} us, "
        f"{1 / sums['beta_s_per_byte'] / 1e9:.2f} GB/s, within {sums['largest_error']:.0%}"
    )
    return "\n".join([f"{measured['processes']} processes", *text, fitted, ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks distributed", description=_SUMMARY)
    shown = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--model", default=shown[0], choices=MODELS, metavar="|".join(shown))
    parser.add_argument("--repeats", type=int, default=8, help="turns of each row")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    for name, least in (("repeats", 1), ("steps", 1), ("processes", 2)):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < least:
            parser.error(f"--{name} must be >= {least}, got {value}")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists, got {args.out}")
    for measured in run(args)["runs"]:
        print(table(measured))


_SUMMARY = (__doc__ or "").splitlines()[0]
