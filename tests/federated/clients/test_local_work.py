"""The samples that each local step sees, as properties."""

import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchpisa.federated import Epochs, FullGradient, Minibatches
from torchpisa.federated.clients.local_work import Key, LocalWork

property_test = settings(deadline=None, max_examples=60)
samples = st.integers(1, 40)
sizes = st.integers(1, 50)
rounds = st.integers(0, 30)
keys = st.tuples(st.integers(0, 2**40), st.sampled_from(["0", "1", "17", "a client"]))
works = st.one_of(
    st.builds(FullGradient, st.integers(1, 4)),
    st.builds(Minibatches, st.integers(1, 5), sizes),
    st.builds(Epochs, st.floats(0.05, 3.2), sizes),
)


def drawn(work: LocalWork, n: int, key: Key, iteration: int) -> list[list[int]]:
    return [index.tolist() for index in work.plan(n, key, iteration)]


def joined(work: LocalWork, n: int, key: Key, count: int) -> list[int]:
    """Return all samples of the first `count` rounds, in order."""
    return [i for k in range(count) for index in drawn(work, n, key, k) for i in index]


@property_test
@given(works, samples, keys, rounds)
def test_plans_are_pure(work: LocalWork, n: int, key: Key, iteration: int) -> None:
    """Not of the generator, nor of what was asked before."""
    first = drawn(work, n, key, iteration)
    torch.rand(3)
    work.plan(n, key, iteration + 1)
    assert drawn(work, n, key, iteration) == first
    assert all(0 <= i < n for index in first for i in index)
    assert first
    assert all(first)
    assert all(index.dtype == torch.int64 for index in work.plan(n, key, iteration))


@property_test
@given(samples, sizes, keys, rounds)
def test_one_epoch_covers_every_sample_once(n: int, size: int, key: Key, iteration: int) -> None:
    plan = drawn(Epochs(1, size), n, key, iteration)
    assert sorted(i for index in plan for i in index) == list(range(n))
    assert len(plan) == math.ceil(n / size)
    assert all(len(index) == size for index in plan[:-1])


@property_test
@given(samples, sizes, st.floats(0.05, 3.2), keys, st.integers(1, 12))
def test_fractions_of_epochs_go_on(n: int, size: int, epochs: float, key: Key, k: int) -> None:
    """No sample is drawn a second time before all have been drawn once, across rounds."""
    wanted = max(1, round(epochs * n))
    row = joined(Epochs(epochs, size), n, key, k)
    assert len(row) == k * wanted
    counts = Counter(row)
    total = k * wanted / n
    assert all(math.floor(total) <= counts[i] <= math.ceil(total) for i in range(n))
    for start in range(0, len(row) - n + 1, n):
        assert sorted(row[start : start + n]) == list(range(n))


@property_test
@given(samples, sizes, st.integers(1, 5), keys, st.integers(1, 12))
def test_minibatches_are_full_and_go_on(n: int, size: int, steps: int, key: Key, k: int) -> None:
    work = Minibatches(steps, size)
    for iteration in range(k):
        plan = drawn(work, n, key, iteration)
        assert [len(index) for index in plan] == [min(size, n)] * steps
    row = joined(work, n, key, k)
    for start in range(0, len(row) - n + 1, n):
        assert sorted(row[start : start + n]) == list(range(n))
    last = row[len(row) - len(row) % n :]
    assert len(set(last)) == len(last)


@property_test
@given(samples, st.integers(1, 4), keys, rounds)
def test_full_gradients(n: int, steps: int, key: Key, iteration: int) -> None:
    assert drawn(FullGradient(steps), n, key, iteration) == [list(range(n))] * steps


@property_test
@given(st.integers(1, 9), keys, rounds)
def test_a_client_smaller_than_the_batch(n: int, key: Key, iteration: int) -> None:
    """It uses all it has, never a sample twice in one step."""
    everything = list(range(n))
    for work in (Minibatches(3, 10), Epochs(3, 10)):
        if isinstance(work, Minibatches):
            plan = drawn(work, n, key, iteration)
            assert [sorted(index) for index in plan] == [everything] * 3
        else:
            row = [i for index in drawn(work, n, key, iteration) for i in index]
            assert Counter(row) == dict.fromkeys(everything, 3)


def test_shuffles_differ_between_passes_clients_and_seeds() -> None:
    work = Epochs(1, 100)
    orders = [
        drawn(work, 30, key, iteration)
        for key in ((0, "0"), (0, "1"), (1, "0"))
        for iteration in range(3)
    ]
    assert len({tuple(order[0]) for order in orders}) == 9
    assert list(range(30)) not in [order[0] for order in orders]


def test_at_least_one_sample() -> None:
    """A small fraction of few samples rounds to none."""
    assert [len(index) for index in Epochs(0.01).plan(5, (0, "0"), 0)] == [1]


Case = tuple[Any, dict[str, Any], str]
CASES: list[Case] = [
    (FullGradient, {"steps": 0}, "steps must be an integer >= 1, got 0"),
    (FullGradient, {"chunk": 0}, "chunk must be an integer >= 1, got 0"),
    (Minibatches, {"steps": 1.5}, "steps must be an integer >= 1, got 1.5"),
    (Minibatches, {"batch_size": -1}, "batch_size must be an integer >= 1, got -1"),
    (Minibatches, {"chunk": True}, "chunk must be an integer >= 1, got True"),
    (Epochs, {"epochs": 0}, "epochs must be a finite number > 0, got 0"),
    (Epochs, {"epochs": math.inf}, "epochs must be a finite number > 0, got inf"),
    (Epochs, {"epochs": math.nan}, "epochs must be a finite number > 0, got nan"),
    (Epochs, {"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
    (Epochs, {"chunk": 0}, "chunk must be an integer >= 1, got 0"),
]


@pytest.mark.parametrize(("make", "arguments", "message"), CASES)
def test_messages_name_argument_value_and_range(
    make: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**arguments)
