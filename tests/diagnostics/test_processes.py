"""Several processes: the rows of one process that holds all batches and all of the model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import backward, here, network, settings, together
from tests.distributed.processes import RankError, run
from torchpisa import NSISA, SISA
from torchpisa.diagnostics import Diagnostics
from torchpisa.distributed import attach, shard

# Noise and unequal data, where it is right to warn.
pytestmark = pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning")

Rows = list[dict[str, float]]

DTYPE = torch.float64
ROUNDS = 6


def rows_of(model: Any, opt: Any, nodes: list[int], forward: Any = None, **outputs: Any) -> Rows:
    rows: Rows = []
    with Diagnostics(opt, every=2, callback=rows.append, **outputs):
        for step in range(ROUNDS):
            for node in nodes:
                opt.zero_grad()
                backward(forward or model, node, step, DTYPE)
                opt.step()
    return rows


def alone(make: Any, nodes: int, **more: Any) -> Rows:
    model = network()
    everyone = list(range(nodes))
    opt = make(model.parameters(), **{**settings(make, everyone), **more})
    return rows_of(model, opt, everyone)


def same(results: list[Rows], expected: Rows) -> None:
    assert len(expected) == ROUNDS // 2
    for rows in results:
        assert rows == results[0]
        for row, other in zip(rows, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-7)


def on_ranks(make: Any, per_rank: int, path: str, **more: Any) -> Rows:
    model, nodes = network(), here(per_rank)
    opt = together(make, nodes, **more)(model.parameters())
    return rows_of(model, opt, nodes, csv=path)


@pytest.mark.parametrize(("make", "ranks", "per_rank"), [(SISA, 2, 1), (SISA, 2, 2), (NSISA, 4, 1)])
def test_ranks(make: Any, ranks: int, per_rank: int, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    expected = alone(make, ranks * per_rank)
    same(run(on_ranks, ranks, make, per_rank, str(path)), expected)
    assert len(path.read_text().splitlines()) == 1 + len(expected)  # one of them writes


def attached() -> Rows:
    """Train with DDP's hook, where duals change in the backward pass already."""
    model = network()
    opt = together(SISA, here())(model.parameters())
    parallel = DistributedDataParallel(model)
    attach(opt, parallel)
    return rows_of(model, opt, here(), parallel)


def test_attached_model() -> None:
    same(run(attached, 2), alone(SISA, 2))


def sharded(make: Any, path: str) -> Rows:
    """Train two replicas of two shards."""
    model = network()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    nodes = shard(model, grid, [model[0], model[2]])
    node = grid.get_local_rank("replicate")
    opt = together(make, [node], nodes)(model.parameters())
    return rows_of(model, opt, [node], csv=path)


@pytest.mark.parametrize("make", [SISA, NSISA])
def test_replicas_of_shards(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    same(run(sharded, 4, make, str(path)), alone(make, 2))
    assert len(path.read_text().splitlines()) == 1 + ROUNDS // 2


def fully_sharded(ignored: bool) -> Rows:
    """Train with more processes than some tensors have rows; perhaps with a replicated layer."""
    model = network()
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    kept = set(model[2].parameters()) if ignored else set()
    fully_shard(model, mesh=mesh, ignored_params=kept)
    opt = SISA(model.parameters(), **settings(SISA, [0, 1]))
    return rows_of(model, opt, [0, 1])


@pytest.mark.parametrize("ignored", [False, True])
def test_shards(ignored: bool) -> None:
    same(run(fully_sharded, 4, ignored), alone(SISA, 2))


def one_skips() -> Rows:
    """Train with a rank without data, and one whose gradients are not finite."""
    model, rank = network(), distributed.get_rank()
    opt = together(SISA, here(), nonfinite="raise")(model.parameters())
    rows: Rows = []
    raised = 0
    with Diagnostics(opt, every=1, callback=rows.append):
        for step in range(4):
            opt.zero_grad()
            backward(model, rank, step, DTYPE)
            if (step, rank) == (2, 1):
                model[0].weight.grad[0, 0] = torch.nan
            if (step, rank) == (1, 0):
                opt.skip()
                continue
            try:
                opt.step()
            except FloatingPointError:
                raised += 1
    assert raised == 1
    return rows


def test_a_rank_that_takes_no_part() -> None:
    first, second = run(one_skips, 2)
    assert first == second
    assert [row["absent"] for row in first] == [0, 1, 2, 2]


def disagree() -> None:
    opt = together(SISA, here())(network().parameters())
    Diagnostics(opt, every=1 + distributed.get_rank())


def test_ranks_must_agree() -> None:
    with pytest.raises(RankError, match="every must be the same on all ranks"):
        run(disagree, 2)
