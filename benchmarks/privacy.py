"""Central differential privacy: accuracy beside epsilon, for a few numbers of clients.

    python -m benchmarks.privacy --out docs/results/privacy.json
    python -m benchmarks.privacy --show docs/results/privacy.json

scikit-learn's digits, a linear model, iid clients of equal size, 40 rounds with everybody, one
gradient of all local data per round, three seeds. `GaussianNoise.for_epsilon` finds the noise for
delta 1e-3. The norm that updates are clipped to is the best of three for each algorithm, chosen
with 50 clients, epsilon 8 and a seed that is not among the three.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

from benchmarks import environment
from benchmarks.digits import digits
from torchpisa.federated import (
    MISA,
    SISA,
    FedAvg,
    FullGradient,
    GaussianNoise,
    Simulation,
    accuracy,
)
from torchpisa.federated.algorithms.base import Algorithm
from torchpisa.federated.partition import iid

ROUNDS, DELTA = 40, 1e-3
ALGORITHMS: dict[str, Algorithm] = {
    "SISA": SISA(sigma=1.0, rho=1.0),
    "MISA": MISA(sigma=0.1, rho=10.0, momentum=0.95, match_rms=False),
    "FedAvg": FedAvg(lr=1.0, local=FullGradient()),
}
CLIPS = {"SISA": (0.01, 0.03, 0.1), "MISA": (0.003, 0.01, 0.03), "FedAvg": (0.1, 0.3, 1.0)}
CLIENTS, EPSILONS, SEEDS = (50, 200), (None, 32.0, 8.0, 2.0), (0, 1, 2)


def run(name: str, clients: int, epsilon: float | None, clip: float, seed: int) -> dict[str, Any]:
    """Run one training; without an epsilon, it has neither noise nor clipping."""
    torch.set_num_threads(1)
    (inputs, targets), test = digits()
    data = [(inputs[part], targets[part]) for part in iid(len(targets), clients, seed=seed).indices]
    privacy = None
    if epsilon is not None:
        privacy = GaussianNoise.for_epsilon(
            epsilon, clip=clip, rounds=ROUNDS, clients=clients, delta=DELTA
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(64, 10)
    simulation = Simulation(model, data, ALGORITHMS[name], seed=seed, privacy=privacy)
    rows = simulation.run(ROUNDS, evaluate=accuracy(*test), every=ROUNDS, progress=False)
    return {
        "algorithm": name,
        "clients": clients,
        "epsilon": epsilon,
        "clip": clip,
        "noise": None if privacy is None else privacy.noise,
        "reported_epsilon": rows[-1].get("epsilon"),
        "seed": seed,
        "accuracy": round(rows[-1]["accuracy"], 2),
    }


def show(result: dict[str, Any]) -> str:
    """Return the table in docs/robust.md."""
    groups: dict[tuple[Any, ...], list[float]] = {}
    for r in result["runs"]:
        groups.setdefault((r["clients"], r["algorithm"], r["epsilon"]), []).append(r["accuracy"])
    lines = ["| clients | | no privacy | epsilon 32 | 8 | 2 |", "|---|---|---|---|---|---|"]
    for clients, name in product(CLIENTS, ALGORITHMS):
        cells = [f"{mean(groups[clients, name, epsilon]):.1f}" for epsilon in EPSILONS]
        lines.append(f"| {clients} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.privacy", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--show", type=Path, help="JSON file to print as a table")
    args = parser.parse_args()
    if args.show:
        print(show(json.loads(args.show.read_text())))
        return
    trials = [run(name, 50, 8.0, clip, 10) for name in ALGORITHMS for clip in CLIPS[name]]
    best = {
        name: max((t for t in trials if t["algorithm"] == name), key=lambda t: t["accuracy"])
        for name in ALGORITHMS
    }
    jobs = product(ALGORITHMS, CLIENTS, EPSILONS, SEEDS)
    result = {
        "script": "benchmarks/privacy.py",
        "setting": {"rounds": ROUNDS, "delta": DELTA},
        "algorithms": {name: a.fingerprint for name, a in ALGORITHMS.items()},
        "versions": environment.versions("scikit-learn", "opacus"),
        "hardware": environment.hardware("cpu"),
        "trials": trials,
        "runs": [run(n, c, e, best[n]["clip"], s) for n, c, e, s in jobs],
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(show(result))


if __name__ == "__main__":
    main()
