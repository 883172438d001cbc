"""MISA's step on several processes: all of them orthogonalise all matrices, or one does each.

    python -m benchmarks owners --processes 2 4 --out docs/results/owners.json

Real processes on this host, one thread each, step the hidden matrices of a transformer; they talk
over gloo. Gradients are given, so this is the optimizer's step and nothing else. The rows take
turns. The table goes to `owners.md` beside FILE.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from benchmarks import environment
from benchmarks.distributed.measure import Turn, timed
from benchmarks.distributed.processes import start
from benchmarks.shapes import gpt2
from benchmarks.step import rounded
from torchpisa import MISA
from torchpisa.distributed import owners
from torchpisa.kernels import newton_schulz
from torchpisa.optim.param_groups import is_matrix
from torchpisa.preconditioners.consensus import Stage, Whiten

__all__ = ["Plan", "main", "measure", "table"]


class Plan(NamedTuple):
    """The extent of a measurement.

    Attributes:
        width: the width of the transformer.
        layers: the number of its layers.
        steps: that are timed in one turn of a row, after one that is not.
        repeats: turns of each row.
        seed: seed of weights and gradients.
    """

    width: int
    layers: int
    steps: int
    repeats: int
    seed: int


class Row(NamedTuple):
    """A way to step.

    Attributes:
        name: its name in the table.
        placement: "copies" (DDP), "shards" (FSDP2) or "grid" (HSDP, two replicas).
        once: whether each matrix has an owner among the processes that hold parts of it.
        replicas: whether replicas share the work.
        before: a stage, or None.
        against: the row in which all do everything.
    """

    name: str
    placement: str
    once: bool
    replicas: bool
    before: Stage | None
    against: str


DDP, FSDP2, HSDP, STAGE = (
    f"{name}, all ranks do all" for name in ("DDP", "FSDP2", "HSDP", "DDP, `Whiten()`")
)
ROWS = [
    Row(DDP, "copies", False, False, None, DDP),
    Row("DDP, `replicas`", "copies", True, True, None, DDP),
    Row(FSDP2, "shards", False, False, None, FSDP2),
    Row("FSDP2", "shards", True, False, None, FSDP2),
    Row(HSDP, "grid", False, False, None, HSDP),
    Row("HSDP", "grid", True, False, None, HSDP),
    Row("HSDP, `replicas`", "grid", True, True, None, HSDP),
    Row(STAGE, "copies", False, False, Whiten(), STAGE),
    Row("DDP, `Whiten()`, `replicas`", "copies", True, True, Whiten(), STAGE),
    Row("FSDP2, `Whiten()`", "shards", True, False, Whiten(), STAGE),
]


class Stepped:
    """Matrices and the optimizer of a row, as one process holds them."""

    def __init__(self, row: Row, plan: Plan) -> None:
        self.row = row
        ranks = distributed.get_world_size()
        generator = torch.Generator().manual_seed(plan.seed)
        shapes = [shape.size for shape in gpt2(plan.width, plan.layers) if shape.kind == "matrix"]
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        placements: list[Any] = [Shard(0)]
        replicas: Any = distributed.group.WORLD
        if row.placement == "grid":
            names = ("replicate", "shard")
            mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=names)
            placements, replicas = [Replicate(), Shard(0)], mesh["replicate"]

        def held(tensor: Tensor) -> Tensor:
            copies = row.placement == "copies"
            return tensor if copies else distribute_tensor(tensor, mesh, placements)

        self.params = [
            nn.Parameter(held(0.02 * torch.randn(shape, generator=generator))) for shape in shapes
        ]
        for param, shape in zip(self.params, shapes, strict=True):
            param.grad = held(torch.randn(shape, generator=generator))
        assert all(is_matrix(param) for param in self.params)
        settings = {"replicas": replicas if row.replicas else None, "before": row.before}
        self.optimizer = MISA([{"params": self.params, "matrix": True}], **settings)

    def step(self) -> None:
        """Take a step; without owners, as if nobody knew how the matrices are cut."""
        brought_together = patch.object(owners, "_layout", lambda whole: None)
        apart = self.row.once or self.row.placement == "copies"
        with nullcontext() if apart else brought_together:
            self.optimizer.step()


def measure(plan: Plan) -> dict[str, Any]:
    """Return the part of the result for this number of processes; called on all ranks."""
    ranks = distributed.get_world_size()
    rows = [row for row in ROWS if row.placement != "grid" or ranks >= 4]
    stepped = {row.name: Stepped(row, plan) for row in rows}
    turns: dict[str, list[Turn]] = {row.name: [] for row in rows}
    for repeat in range(plan.repeats):
        if distributed.get_rank() == 0:
            print(f"{ranks} processes: turn {repeat + 1} of {plan.repeats}", flush=True)
        for row in rows:
            stepped[row.name].step()  # warms up its caches
            turns[row.name].append(timed(stepped[row.name].step, plan.steps))
    differences = _differences(stepped)
    dtype = newton_schulz.dtype_for("auto", stepped[rows[0].name].params)
    described = []
    for row in rows:
        cpu = [turn.cpu_ms for turn in turns[row.name]]
        beside = [turn.cpu_ms for turn in turns[row.against]]
        wires = [turn.wire_bytes for turn in turns[row.name] if turn.wire_bytes is not None]
        described.append(
            {
                "name": row.name,
                "against": row.against,
                "ms": rounded(statistics.median(turn.ms for turn in turns[row.name])),
                "cpu_ms": rounded(statistics.median(cpu)),
                "cpu_ratio": rounded(
                    statistics.median(a / b for a, b in zip(cpu, beside, strict=True))
                ),
                "samples_cpu_ms": [rounded(sample) for sample in cpu],
                "wire_bytes": rounded(min(wires)) if wires else None,  # others can only add to it
                "largest_difference": differences[row.name],
            }
        )
    params = stepped[rows[0].name].params
    return {
        "processes": ranks,
        "matrices": len(params),
        "parameters": sum(param.numel() for param in params),
        "products": str(dtype or torch.float32).removeprefix("torch."),
        "rows": described,
    }


def _differences(stepped: dict[str, Stepped]) -> dict[str, float]:
    """Return how far weights are from those of the row in which all do everything, relatively."""
    weights = {
        name: [p.full_tensor() if hasattr(p, "full_tensor") else p for p in each.params]
        for name, each in stepped.items()
    }
    with torch.no_grad():
        return {
            name: max(
                float((one - other).norm() / other.norm())
                for one, other in zip(weights[name], weights[each.row.against], strict=True)
            )
            for name, each in stepped.items()
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    config, hardware = result["config"], result["hardware"]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    first = result["runs"][0]
    heads = [
        *("", "CPU ms of all processes", "ratio", "ms", "bytes on the wire, all processes"),
        "largest difference",
    ]
    parts = [
        f"The {first['matrices']} hidden matrices of {config['layers']} layers of width "
        f"{config['width']}, {first['parameters'] / 1e6:.1f}M parameters, float32, products in "
        f"{first['products']}. {hardware['cpu']}, {hardware['cores']} cores for all processes, one "
        f"thread each; gloo on one host; {versions}. Medians of {config['repeats']} turns of "
        f"{config['steps']} steps."
    ]
    for run in result["runs"]:
        lines = [f"| {' | '.join(heads)} |", "|---" + "|--:" * (len(heads) - 1) + "|"]
        for row in run["rows"]:
            wire = row["wire_bytes"]
            cells = [
                row["name"],
                f"{row['cpu_ms']:,.0f}",
                f"{row['cpu_ratio']:.2f}",
                f"{row['ms']:,.0f}",
                "–" if wire is None else f"{wire:,.0f}",
                f"{row['largest_difference']:.0e}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        parts += [f"### {run['processes']} processes", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser("python -m benchmarks owners", description=summary)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=6, help="turns of each row")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    args = parser.parse_args(argv)
    for processes in args.processes:
        if processes < 2 or processes % 2:
            parser.error(f"--processes must be even numbers >= 2, got {processes}")
    if args.out and not args.out.parent.is_dir():
        parser.error(f"--out must be in a folder that exists, got {args.out}")
    plan = Plan(args.width, args.layers, args.steps, args.repeats, args.seed)
    result: dict[str, Any] = {
        "config": {**plan._asdict(), "backend": "gloo", "threads_per_process": 1},
        "hardware": environment.hardware("cpu"),
        "versions": environment.versions(),
        "runs": [start(measure, processes, plan) for processes in args.processes],
    }
    print(table(result))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(table(result), encoding="utf-8")
