"""Limits of a server's screen: honest clients must pass, a liar must not matter.

    python -m benchmarks.screen --out docs/results/screen.json
    python -m benchmarks.screen --show docs/results/screen.json

Ten clients with the digits of scikit-learn, spread in four ways, 30 rounds, a linear model. Honest
runs count how many updates `Screen(largest=...)` rejects: with everybody there, and with half of
the clients drawn for every round and a client that first shows up in round 15. Other runs have a
client that lies: -10 times its update in every round, or 900 times its update in round 10 only. In
the latter it says what is honest in all other rounds.

What is measured of an update is the dual that it leaves the client with (`standing`), as the server
does it, or the change of it (`change`), for comparison. The default of `largest` was chosen from
this.
"""

import argparse
import json
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks import environment
from benchmarks.digits import CLIENTS, digits
from benchmarks.pool import end_with_parent
from torchpisa.data import Parts, permutation
from torchpisa.federated import MISA, SISA, FedAvg, FullGradient, Scaffold, accuracy
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, add
from torchpisa.federated.clients.local_round import local_round
from torchpisa.federated.clients.objective import Objective
from torchpisa.federated.flower.screen import Screen, norms, weight_scale
from torchpisa.federated.partition import by_label, by_quantity, dirichlet, iid
from torchpisa.federated.trust.ledger import Ledger

ROUNDS, LIAR, LATE = 30, 1, 15
LIMITS = (2.0, 3.0, 5.0, 10.0, 1000.0)
LOCAL = FullGradient(5)
ALGORITHMS: dict[str, Algorithm] = {
    "SISA": SISA(sigma=0.3, rho=10.0, local=LOCAL),
    "MISA": MISA(sigma=0.1, rho=10.0, momentum=0.95, match_rms=False, local=LOCAL),
    "FedAvg": FedAvg(lr=0.5, local=LOCAL),
    "Scaffold": Scaffold(lr=0.5, local=LOCAL),
}
SPREADS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "iid": lambda labels: iid(len(labels), CLIENTS),
    "one label": lambda labels: by_label(labels, CLIENTS, 1),
    "dirichlet 0.3": lambda labels: dirichlet(labels, CLIENTS, 0.3),
    "amounts": lambda labels: by_quantity(len(labels), CLIENTS, 0.5),
}
HONEST = ("everybody", "half and a newcomer")
LIES = ("-10 x, every round", "900 x, once")


def lie(story: str, iteration: int, update: Message) -> Message:
    """Return what the liar sends instead of its update."""
    factor = {"-10 x, every round": -10.0, "900 x, once": 900.0 if iteration == 10 else 1.0}[story]
    return Message(tree_map(lambda tensor: factor * tensor, update.tensors), update.numbers)


def run(spread: str, name: str, story: str, measure: str, limit: float) -> dict[str, Any]:
    """Run one training."""
    torch.set_num_threads(1)
    (inputs, targets), test = digits()
    data = [(inputs[part], targets[part]) for part in SPREADS[spread](targets).indices]
    torch.manual_seed(0)
    objective = Objective(nn.Linear(64, 10))
    weights = {key: p.detach().clone() for key, p in objective.model.named_parameters()}
    algorithm = ALGORITHMS[name]
    server, screen, ledger = algorithm.start(weights), Screen(largest=limit), Ledger()
    memories = [algorithm.remember(weights) for _ in range(CLIENTS)]
    shares = [len(y) / len(targets) for _, y in data]
    rejected = asked = 0
    for iteration in range(ROUNDS):
        server = algorithm.open(server)
        down = algorithm.broadcast(server)
        updates: dict[int, tuple[Message, Fields]] = {}
        seen: dict[int, dict[str, float]] = {}
        for client in present(story, iteration):
            update, memory, work = local_round(
                *(algorithm, objective, data[client], down, memories[client]),
                key=(0, str(client)),
                iteration=iteration,
            )
            if story in LIES and client == LIAR:
                update = lie(story, iteration, update)
            updates[client] = update, memory
            known = ledger.sums.get(str(client), {}) if measure == "standing" else {}
            steps = torch.tensor(float(work.gradients))
            seen[client] = norms(algorithm.standing(server, update, known, steps))
        total, share = None, 0.0
        for client, (update, memory) in updates.items():
            asked += client != LIAR or story in HONEST
            if screen.complaint(seen[client], list(seen.values()), weight_scale(server)):
                rejected += client != LIAR or story in HONEST
                continue
            ledger.add(str(client), algorithm.contribution(update))
            memories[client] = memory
            total = add(total, update, shares[client])
            share += shares[client]
        screen.close(list(seen.values()))
        server = algorithm.skip(server) if total is None else algorithm.close(server, total, share)
    with torch.no_grad():
        for key, value in server.weights.items():
            objective.model.get_parameter(key).copy_(value)
    return {
        "spread": spread,
        "algorithm": name,
        "story": story,
        "measure": measure,
        "largest": limit,
        "honest_updates": asked,
        "honest_rejected": rejected,
        "accuracy": round(accuracy(*test)(objective.model)["accuracy"], 2),
    }


def present(story: str, iteration: int) -> list[int]:
    """Return the clients of a round."""
    if story != "half and a newcomer":
        return list(range(CLIENTS))
    joined = CLIENTS if iteration >= LATE else CLIENTS - 1
    return sorted(permutation(joined, "screen", iteration)[: CLIENTS // 2].tolist())


def show(result: dict[str, Any]) -> str:
    """Return the table in docs/flower.md."""
    runs = result["runs"]
    lines = [
        "| largest | honest updates rejected | of the change alone | "
        + " | ".join(f"{name}, {story}" for story in LIES for name in ("SISA", "FedAvg"))
        + " |",
        "|---|---|---|" + "---|" * 4,
    ]
    for limit in LIMITS:
        rates = []
        for measure in ("standing", "change"):
            honest = [
                r
                for r in runs
                if (r["measure"], r["largest"]) == (measure, limit) and r["story"] in HONEST
            ]
            part = sum(r["honest_rejected"] for r in honest)
            rates.append(f"{100 * part / sum(r['honest_updates'] for r in honest):.2f} %")
        cells = []
        for story, name in product(LIES, ("SISA", "FedAvg")):
            rejected = [
                r["accuracy"]
                for spread in ("iid", "one label", "dirichlet 0.3")
                for r in runs
                if (r["spread"], r["algorithm"], r["story"], r["measure"], r["largest"])
                == (spread, name, story, "standing", limit)
            ]
            cells.append(" / ".join(f"{x:.1f}" for x in rejected))
        lines.append(f"| {limit:g} | {' | '.join(rates)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.screen", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--show", type=Path, help="JSON file to print as a table")
    args = parser.parse_args()
    if args.show:
        print(show(json.loads(args.show.read_text())))
        return
    jobs = [
        *product(SPREADS, ALGORITHMS, HONEST, ("standing", "change"), LIMITS),
        *product(SPREADS, ALGORITHMS, LIES, ("standing",), LIMITS),
    ]
    workers = max(1, (os.cpu_count() or 2) - 1)
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        runs = list(pool.map(run, *zip(*jobs, strict=True)))
    result = {
        "script": "benchmarks/screen.py",
        "setting": {"clients": CLIENTS, "rounds": ROUNDS, "seed": 0, "local_steps": LOCAL.steps},
        "algorithms": {name: algorithm.fingerprint for name, algorithm in ALGORITHMS.items()},
        "versions": environment.versions("flwr", "scikit-learn"),
        "hardware": environment.hardware("cpu"),
        "runs": runs,
    }
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(show(result))


if __name__ == "__main__":
    main()
