"""SISA on digits in several parts, mixed and sorted by label, over a grid of sigma and rho.

    python -m benchmarks.uneven_parts --out docs/results/uneven_parts.json
    python -m benchmarks.uneven_parts --show docs/results/uneven_parts.json

What SISA takes for sigma or rho, if only the other one is given and `batches > 1`, was chosen from
it, on validation.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F

import torchpisa
from benchmarks import environment
from benchmarks.pool import end_with_parent
from benchmarks.tasks import digits_mlp, load_digits_split
from torchpisa.data import Parts, RoundSampler, split

GRADIENTS, BATCH_SIZE, SEEDS = 2000, 32, 2
GRID = list(product((0.5, 1.0, 2.0, 3.0, 5.0), (1.0, 100.0, 300.0, 1000.0)))
LABELS = {
    "4 parts, sorted": [(0,), (1, 2), (3, 4, 5), (6, 7, 8, 9)],
    "10 parts, one label each": [(label,) for label in range(10)],
}


def parts_by_name(labels: torch.Tensor) -> dict[str, Parts]:
    """Return the divisions of the training data by name."""
    sorted_parts = {
        name: Parts.from_indices(
            [torch.isin(labels, torch.tensor(group)).nonzero().flatten() for group in groups]
        )
        for name, groups in LABELS.items()
    }
    return {"4 parts, mixed": split(len(labels), 4), **sorted_parts}


def train(sigma: float, rho: float) -> list[dict[str, Any]]:
    """Train all divisions and seeds with one sigma and rho."""
    torch.set_num_threads(1)
    task = digits_mlp(Path(), torch.device("cpu"))
    x, y = load_digits_split()["train"]
    runs = []
    for (name, parts), seed in product(parts_by_name(y).items(), range(SEEDS)):
        torch.manual_seed(seed)
        model = task.model()
        settings = {"batches": len(parts), "weights": parts.weights, "nonfinite": "skip"}
        opt = torchpisa.SISA(model.parameters(), sigma=sigma, rho=rho, **settings)
        rounds = GRADIENTS // len(parts)
        for index in RoundSampler(parts, BATCH_SIZE, rounds=rounds, seed=seed):
            opt.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            opt.step()
        with torch.no_grad():
            loss = float(F.cross_entropy(model(x), y))
        accuracy = task.evaluate(model, "validation")
        run = {"sigma": sigma, "rho": rho, "parts": name, "seed": seed}
        runs.append({**run, "training_loss": loss, "validation": accuracy})
    return runs


def table(runs: list[dict[str, Any]]) -> str:
    """Return validation accuracy and training loss as Markdown, means over seeds."""
    names = list(dict.fromkeys(run["parts"] for run in runs))
    rows = [f"| sigma | rho | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for sigma, rho in GRID:
        cells = []
        for name in names:
            same = [r for r in runs if (r["sigma"], r["rho"], r["parts"]) == (sigma, rho, name)]
            accuracy, loss = (mean(r[key] for r in same) for key in ("validation", "training_loss"))
            cells.append(f"{accuracy:.1f} % ({loss:.2g})")
        rows.append(f"| {sigma:g} | {rho:g} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="docs/results/uneven_parts.json", type=Path)
    parser.add_argument("--show", type=Path, help="a saved file: print its table")
    args = parser.parse_args()
    if args.show:
        print(table(json.loads(args.show.read_text())["runs"]))
        return
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), end_with_parent) as pool:
        runs = [run for runs in pool.map(train, *zip(*GRID, strict=True)) for run in runs]
    device, versions = environment.device_name("cpu"), environment.versions()
    header = {"device": device, "versions": versions, "gradients": GRADIENTS}
    args.out.write_text(json.dumps({**header, "batch_size": BATCH_SIZE, "runs": runs}) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
