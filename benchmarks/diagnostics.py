"""The cost of `Diagnostics`: `opt.step()` of SISA with and without it.

    python -m benchmarks diagnostics --device cpu --save docs/results/diagnostics_cpu.json

No model runs, so the ratio is to the step alone; of a training it is less. A sample is the time of
the steps from row to row, one measurement among them, and those with and without take turns. The
measurement is also timed by itself. On a CPU, times are the processor's, of all threads: what else
the machine does disturbs those less. What is saved as `diagnostics_*.json` is shown in the
`diagnostics.md` beside it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment
from benchmarks.rows import LR
from benchmarks.shapes import MODELS, parameters
from benchmarks.step import rounded
from benchmarks.stopwatch import Problem
from torchpisa import SISA
from torchpisa.diagnostics import Diagnostics, measure
from torchpisa.diagnostics.sampling import SampleLayout

__all__ = ["main"]

USUAL = {"cpu": "gpt2-50m", "cuda": "gpt2-124m"}
ALONE = 10  # measurements that are timed by themselves


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure for every number of batches."""
    problem = Problem(args.model, args.device, args.seed)
    every = args.every or signature(Diagnostics).parameters["every"].default
    config = {
        "model": args.model,
        "parameters": parameters(problem.shapes),
        "tensors": len(problem.shapes),
        "device": args.device,
        "dtype": "float32",
        "every": every,
        "repeats": args.repeats,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "lr": LR,
    }
    return {
        "config": config,
        "hardware": environment.hardware(args.device),
        "versions": environment.versions(),
        "rows": [row(problem, batches, every, args.repeats) for batches in args.batches],
    }


def row(problem: Problem, batches: int, every: int, repeats: int) -> dict[str, Any]:
    """Return the times of a step with and without Diagnostics, and of a measurement."""
    opt = SISA(problem.params, lr=LR, batches=batches)
    problem.restore()
    times: dict[bool, list[float]] = {False: [], True: []}
    with Diagnostics(opt, every=every) as watch:
        watching = opt.observers
        timed(opt.step, every * batches, problem)
        for _ in range(repeats):
            for watched in times:
                opt.observers = watching if watched else ()
                times[watched].append(timed(opt.step, every * batches, problem))
            assert watch.latest["iteration"] == opt.iteration, "no row was measured"
    problem.check()
    without, with_it = times[False], times[True]
    ms, measurement_ms = statistics.median(without), measurement_ms_alone(opt, problem)
    return {
        "batches": batches,
        "without_ms": rounded(ms),
        "with_ms": rounded(statistics.median(with_it)),
        "ratio": rounded(statistics.median(with_it) / ms),
        "measurement_ms": rounded(measurement_ms),
        "measurement_share": rounded(measurement_ms / (every * batches * ms)),
        "without_samples_ms": [rounded(sample) for sample in without],
        "with_samples_ms": [rounded(sample) for sample in with_it],
    }


@torch.no_grad()
def measurement_ms_alone(opt: SISA, problem: Problem) -> float:
    """Return the milliseconds of a row: a snapshot before the round and the rest after it."""
    layout = SampleLayout(opt)

    def once() -> None:
        before = measure.take_snapshot(opt, layout)
        layout.matches(opt)
        measure.measure(opt, before, measure.take_snapshot(opt, layout))

    return timed(once, ALONE, problem)


def timed(work: Callable[[], object], times: int, problem: Problem) -> float:
    """Return milliseconds per call, from the first call to the end of the last one's work."""
    clock = time.process_time if problem.device.type == "cpu" else time.perf_counter
    problem.wait()
    start = clock()
    for _ in range(times):
        work()
    problem.wait()
    return (clock() - start) / times * 1e3


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| | step | with a row every | ratio | a measurement alone | of the steps between rows |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        config, hardware = result["config"], result["hardware"]
        where = hardware["gpu"] or f"CPU, {config['threads']} thread(s)"
        model = f"{config['model']}, {config['parameters']:,} parameters"
        for row in result["rows"]:
            cells = [
                f"{model}, m = {row['batches']}, {where}",
                f"{row['without_ms']:.3g} ms",
                f"{config['every']} rounds: {row['with_ms']:.3g} ms",
                f"{row['ratio']:.3f}",
                f"{row['measurement_ms']:.2g} ms",
                f"{100 * row['measurement_share']:.2g} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save(result: dict[str, Any], path: Path) -> None:
    """Write the result, and the table of all that lie beside it."""
    path.write_text(json.dumps(result) + "\n", encoding="utf-8")
    others = sorted(path.parent.glob("diagnostics_*.json"))
    results = [json.loads(other.read_text(encoding="utf-8")) for other in others]
    path.with_name("diagnostics.md").write_text(table(results) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks diagnostics", description=_SUMMARY)
    shown = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=MODELS, metavar="|".join(shown))
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--every", type=int, help="rounds from row to row; that of Diagnostics")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of torch on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.device not in USUAL:
        parser.error(f"--device must be cuda or cpu, got {args.device}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and there is none")
    for name in ("repeats", "threads", "every"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be >= 1, got {getattr(args, name)}")
    if min(args.batches) < 1:
        parser.error(f"--batches must be >= 1, got {min(args.batches)}")
    if args.save and not args.save.parent.is_dir():
        parser.error(f"--save must be in a folder that exists, got {args.save}")
    if args.threads:
        torch.set_num_threads(args.threads)
    args.model = args.model or USUAL[args.device]
    result = run(args)
    print(table([result]))
    if args.save:
        save(result, args.save)


_SUMMARY = (__doc__ or "").splitlines()[0]
