"""Several processes in every framework: what is averaged, what is not, and what is refused."""

import sys
from typing import Any

import pytest
import torch

from tests.distributed.launch import run
from tests.integrations.windows import CASES, STEPS, assert_equal, plain

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)

from tests.integrations.ranks_worker import (  # noqa: E402
    DATA,
    OVERFLOW,
    RANKS,
    REFUSED,
    RUNS,
    network,
)

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """All cases run in one process group, because starting processes takes longest."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run(sys.executable, "-m", "tests.integrations.ranks_worker", folder)
    assert done.returncode == 0, done.stderr[-5000:]

    def load(framework: str, name: str) -> list[Any]:
        place = folder / f"{framework}_{name}"
        return [torch.load(place / f"rank{rank}.pt") for rank in range(RANKS)]

    return load


def in_turn() -> tuple[list[Any], list[int]]:
    """Micro-batches by window, rank and slot, as nodes are numbered, and where they are in DATA."""
    numbers = [
        start + RANKS * slot + rank
        for start in range(0, len(DATA), RANKS * STEPS)
        for rank in range(RANKS)
        for slot in range(STEPS)
    ]
    return [DATA[number] for number in numbers], numbers


def expected(name: str) -> Any:
    """One process with all micro-batches, joined where ranks average, and else in turn."""
    case = CASES[name]
    if case.own:
        batches, _ = in_turn()
        return plain(case.plain, batches, net=network(), steps=RANKS * STEPS)
    joined = [
        {key: torch.cat([batch[key] for batch in DATA[start : start + RANKS]]) for key in DATA[0]}
        for start in range(0, len(DATA), RANKS)
    ]
    return plain(case.plain, joined, net=network())


def check(ranks: list[Any], wanted: Any) -> None:
    for weights in ranks:
        assert not isinstance(weights, str), weights
        net = network()
        for param, weight in zip(net.parameters(), weights, strict=True):
            param.data = weight
        assert_equal(net, wanted, rtol=1e-9)


EQUAL = [case for case in RUNS if "overflow" not in case[0]]


@pytest.mark.parametrize(("framework", "name"), EQUAL, ids=map("-".join, EQUAL))
def test_windows_of_two_ranks_are_rounds(framework, name, found):
    check(found(framework, name), expected(name))


def test_an_overflow_on_one_rank_is_its_own(found):
    """It and the rest of its rank's window are absent; the other rank goes on undisturbed."""
    net = network()
    optimizer = CASES["sisa-nodes"].plain(net.parameters())
    for batch, number in zip(*in_turn(), strict=True):
        absent = number % RANKS == OVERFLOW % RANKS and (
            OVERFLOW <= number < OVERFLOW - OVERFLOW % (RANKS * STEPS) + RANKS * STEPS
        )
        if absent:
            optimizer.skip()
            continue
        optimizer.zero_grad()
        net(**batch)["loss"].backward()
        optimizer.step()
    check(found("accelerate-overflow", "sisa-nodes"), net)


@pytest.mark.parametrize("framework", [name for name, _ in REFUSED if name.startswith("bare")])
def test_nodes_without_an_adapter_are_refused(framework, found):
    for message in found(framework, "sisa-nodes"):
        assert isinstance(message, str)
        assert "gradients must be those of each rank's own data" in message
        assert "torchpisa.integrations" in message


def test_the_state_of_another_rank_is_refused(found):
    """Accelerate saves the first rank's only, and would load it on all of them."""
    first, second = found("accelerate-loaded", "sisa-nodes")
    assert not isinstance(first, str)
    assert "state_dict must be that of rank 1, got that of rank 0" in second
    assert "torchpisa.distributed.save" in second


def test_a_model_without_ddp_is_refused(found):
    for message in found("unwrapped", "sisa-nodes"):
        assert "needs a model in DistributedDataParallel here, got Net" in message
