"""Ranks that fail: killed and started again by torchrun, or with batches that cannot be used.

Whatever happens to one of them, the others are neither left waiting nor paired with the wrong
iteration.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.distributed import elastic_worker
from tests.distributed.elastic_worker import Kill
from tests.distributed.launch import torchrun
from tests.distributed.problem import (
    Weights,
    backward,
    difference,
    here,
    identical,
    network,
    settings,
    together,
    weights,
)
from tests.distributed.processes import RankError, run
from torchpisa import SISA
from torchpisa.distributed import attach, latest

# Killed and started again

# Both from a checkpoint in the middle of a round. Ranks that are killed while they save are in
# test_checkpoint.py.


def test_torchrun_starts_killed_ranks_again(tmp_path: Path) -> None:
    """The rank is killed while its contribution is on its way to the other."""
    folder = tmp_path / "killed"
    folder.mkdir()
    kills = json.dumps([Kill(0, 4, "backward")])
    command = ["-m", elastic_worker.__name__, folder, "attach", kills]
    done = torchrun(*command, ranks=2, restarts=1, timeout=180)
    assert done.returncode == 0, done.stderr
    last = folder / "step-000003"
    assert (folder / "resumed").read_text().split() == ["None", str(last)]
    results = [torch.load(folder / f"result-{rank}.pt") for rank in range(2)]

    shutil.copytree(last, tmp_path / "resumed" / last.name)
    assert same(results, run(elastic_worker.train, 2, tmp_path / "resumed", "attach"))
    # Two ranks add up in one way only, so a run from the start ends there too.
    assert same(results, run(elastic_worker.train, 2, tmp_path / "undisturbed", "attach"))


def test_killed_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    """The other one waits for the killed one to end the round."""
    work = (elastic_worker.train, 2, tmp_path / "killed", "process_group")
    with pytest.raises(RankError, match="rank 0"):
        run(*work, Kill(1, 10, "backward"), killed=1)
    assert latest(tmp_path / "killed") == tmp_path / "killed" / "step-000009"
    results = run(*work)
    assert [result["resumed"] for result in results] == [9, 9]
    assert same(results, run(elastic_worker.train, 2, tmp_path / "undisturbed", "process_group"))


def same(results: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Return whether the last losses and the weights are the same to the last bit, on all ranks."""
    return all(
        own["losses"][-3:] == other["losses"][-3:]
        and identical([own["weights"], other["weights"], results[0]["weights"]])
        for own, other in zip(results, others, strict=True)
    )


# Batches that cannot be used


def is_bad(step: int, node: int) -> bool:
    """In some rounds a few nodes, in others all of a rank or of all ranks."""
    return step == 4 or (7 * step + 3 * node) % 5 == 0 or (step == 6 and node in (2, 3))


def disturbed(route: str, how: str, steps: int) -> Weights:
    """Ranks of two nodes each, of which bad batches stay out.

    Args:
        route: "alone" for one process that leaves them out by `skip()`, "process_group" or
            "attach".
        how: "skip()", "infinite" or "scaler".
        steps: rounds.
    """
    model: Any = network()
    if route == "alone":
        nodes = list(range(4))
        opt = SISA(model.parameters(), **settings(SISA, nodes))
    else:
        nodes = here(2)
        opt = together(SISA, nodes, nonfinite="skip")(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=how == "scaler", init_scale=2.0**16)
    if route == "attach":
        model = DistributedDataParallel(model)
        attach(opt, model, scaler=scaler)
    for step in range(steps):
        for node in nodes:
            opt.zero_grad()
            bad = is_bad(step, node)
            if bad and how == "skip()":
                opt.skip()
                continue
            scale = float(scaler.scale(torch.ones(())))
            backward(model, node, step, torch.float64, math.inf if bad else scale)
            scaler.step(opt)
            scaler.update()
        assert opt.synced
        assert opt.iteration == step + 1
    return weights(model)


@pytest.mark.parametrize(
    ("route", "how"),
    [
        ("process_group", "skip()"),
        ("process_group", "infinite"),
        ("process_group", "scaler"),
        ("attach", "infinite"),
        ("attach", "scaler"),
    ],
)
def test_bad_batches_stay_out(route: str, how: str) -> None:
    expected = disturbed("alone", "skip()", steps=20)
    results = run(disturbed, 2, route, how, steps=20)
    assert identical(results)
    assert difference(results, expected) <= 1e-12
