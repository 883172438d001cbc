"""Robust selection of updates: what one malicious client of ten costs, with and without it.

    python -m benchmarks.robust --out docs/results/robust.json
    python -m benchmarks.robust --show docs/results/robust.json

Ten clients with the digits of scikit-learn, spread in three ways, 40 rounds, a linear model, one
gradient of all local data per round. One client

- scales its update by 10,
- flips its sign, times 3,
- trains on labels that are moved by one,
- repeats its first update in every round,
- claims nine times the samples it has, half of all, and trains on moved labels,

in every round. The screen of `torchpisa.federated.flower` is off, so that what is measured is the
selection alone. Where the malicious client is rejected, its data are missing: `honest nine` is a
training without it.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks import environment
from benchmarks.screen import CLIENTS, SPREADS, digits
from torchpisa.federated import MISA, SISA, FedAvg, FullGradient, RobustSelection, accuracy
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, add
from torchpisa.federated.clients.local_round import local_round
from torchpisa.federated.clients.objective import Objective
from torchpisa.federated.flower.ledger import Ledger, without_contribution

ROUNDS, LIAR = 40, 1
ALGORITHMS: dict[str, Algorithm] = {
    "SISA": SISA(sigma=0.3, rho=10.0),
    "MISA": MISA(sigma=0.1, rho=10.0),
    "FedAvg": FedAvg(lr=2.0, local=FullGradient()),
}
STORIES = ("honest", "honest nine", "scaling", "sign flip", "label flip", "replay", "counts")
RULES: dict[str, RobustSelection | None] = {
    "plain sum": None,
    "median": RobustSelection("median"),
    "trimmed mean": RobustSelection("trimmed mean"),
    "krum": RobustSelection("krum"),
    "geometric median": RobustSelection("geometric median"),
}
USED_SPREADS = ("iid", "dirichlet 0.3", "one label")


def run(spread: str, name: str, story: str, rule: str) -> dict[str, Any]:
    """Run one training."""
    torch.set_num_threads(1)
    (inputs, targets), test = digits()
    data = [(inputs[part], targets[part]) for part in SPREADS[spread](targets).indices]
    sizes = [len(y) for _, y in data]
    if story in ("label flip", "counts"):
        x, y = data[LIAR]
        data[LIAR] = x, (y + 1) % 10
    if story == "counts":
        sizes[LIAR] = sum(sizes) - sizes[LIAR]
    present = [i for i in range(CLIENTS) if story != "honest nine" or i != LIAR]
    count = sum(sizes[i] for i in present)
    shares = {i: sizes[i] / count for i in present}
    in_a_row = dict.fromkeys(present, 0)  # rounds in which a client was rejected
    torch.manual_seed(0)
    objective = Objective(nn.Linear(64, 10))
    weights = {key: p.detach().clone() for key, p in objective.model.named_parameters()}
    algorithm, selection = ALGORITHMS[name], RULES[rule]
    server, ledger = algorithm.start(weights), Ledger()
    memories = {i: algorithm.remember(weights) for i in present}
    first: Message | None = None
    wrong = caught = 0
    for iteration in range(ROUNDS):
        server = algorithm.open(server)
        down = algorithm.broadcast(server)
        updates: dict[int, tuple[Message, Fields]] = {}
        standings: dict[str, Fields] = {}
        for client in present:
            update, memory, work = local_round(
                *(algorithm, objective, data[client], down, memories[client]),
                key=(0, str(client)),
                iteration=iteration,
            )
            if client == LIAR:
                first = first or update
                update = lie(story, update, first)
            updates[client] = update, memory
            known = ledger.sums.get(str(client), {})
            steps = torch.tensor(float(work.gradients))
            standings[str(client)] = algorithm.standing(server, update, known, steps)
        rejected = {} if selection is None else selection.rejected(standings)
        for client in present:
            in_a_row[client] = in_a_row[client] + 1 if str(client) in rejected else 0
        wrong += len(rejected.keys() - {str(LIAR)} if story not in STORIES[:2] else rejected)
        caught += str(LIAR) in rejected and story not in STORIES[:2]
        total, share = None, 0.0
        for client, (update, memory) in updates.items():
            if str(client) in rejected:
                continue
            ledger.add(str(client), algorithm.contribution(update))
            memories[client] = memory
            total = add(total, update, shares[client])
            share += shares[client]
        assert total is not None
        server = algorithm.close(server, total, share)
        for client in present:  # as FederatedStrategy does it
            if selection is not None and in_a_row[client] >= selection.patience:
                gone = ledger.forget(str(client))
                server = without_contribution(server, gone, sizes[client], count, count)
                memories[client] = algorithm.remember(weights)
    with torch.no_grad():
        for key, value in server.weights.items():
            objective.model.get_parameter(key).copy_(value)
    return {
        "spread": spread,
        "algorithm": name,
        "story": story,
        "rule": rule,
        "honest_rejected": wrong,
        "liar_rejected": caught,
        "accuracy": round(accuracy(*test)(objective.model)["accuracy"], 2),
    }


def lie(story: str, update: Message, first: Message) -> Message:
    """Return what the malicious client sends instead of its update."""
    if story == "replay":
        return first
    factor = {"scaling": 10.0, "sign flip": -3.0}.get(story, 1.0)
    return Message(tree_map(lambda tensor: factor * tensor, update.tensors), update.numbers)


def show(result: dict[str, Any]) -> str:
    """Return the table in docs/robust.md."""
    lines = ["| data | | " + " | ".join(STORIES) + " |", "|---|---|" + "---|" * len(STORIES)]
    found = {
        (r["spread"], r["algorithm"], r["rule"], r["story"]): r["accuracy"] for r in result["runs"]
    }
    for spread, rule in product(USED_SPREADS, RULES):
        cells = [
            " / ".join(f"{found[spread, name, rule, story]:.1f}" for name in ALGORITHMS)
            for story in STORIES
        ]
        lines.append(f"| {spread} | {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.robust", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--show", type=Path, help="JSON file to print as a table")
    args = parser.parse_args()
    if args.show:
        print(show(json.loads(args.show.read_text())))
        return
    jobs = product(USED_SPREADS, ALGORITHMS, STORIES, RULES)
    result = {
        "script": "benchmarks/robust.py",
        "setting": {"clients": CLIENTS, "rounds": ROUNDS, "seed": 0, "local": "one full gradient"},
        "algorithms": {name: algorithm.fingerprint for name, algorithm in ALGORITHMS.items()},
        "versions": environment.versions("scikit-learn"),
        "hardware": environment.hardware("cpu"),
        "runs": [run(*job) for job in jobs],
    }
    args.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(show(result))


if __name__ == "__main__":
    main()
