"""Partitions: what each kind of skew promises, and every message."""

import hashlib
import math
import random
import re
import sys
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchpisa.data import Parts, split
from torchpisa.federated import partition
from torchpisa.federated.partition import (
    add_noise,
    by_label,
    by_mixture,
    by_owner,
    by_quantity,
    dirichlet,
    iid,
    label_counts,
    noise_levels,
)
from torchpisa.federated.picture import draw

property_test = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**70)
TEN = torch.arange(600) % 10


def as_lists(parts: Parts) -> list[list[int]]:
    return [part.tolist() for part in parts.indices]


def covers(parts: Parts, n: int) -> bool:
    return sorted(chain(*as_lists(parts))) == list(range(n))


@st.composite
def unbalanced(draw: st.DrawFn, least: int = 1) -> Tensor:
    """Return labels of any values, in any order, from rare to common."""
    values = draw(st.lists(st.integers(-50, 50), min_size=1, max_size=7, unique=True))
    counts = [draw(st.integers(least, least + 60)) for _ in values]
    labels = list(chain(*([value] * count for value, count in zip(values, counts, strict=True))))
    return torch.tensor(labels)[split(len(labels), 1, seed=draw(seeds)).indices[0]]


def skew(parts: Parts, labels: Tensor) -> float:
    """Return the mean over clients of the total variation between its labels and all."""
    counts = label_counts(parts, labels).double()
    shares = counts / counts.sum(1, keepdim=True)
    return float((shares - counts.sum(0) / counts.sum()).abs().sum(1).mean() / 2)


# A number of labels per client


@property_test
@given(labels=unbalanced(least=12), clients=st.integers(1, 12), data=st.data(), seed=seeds)
def test_every_client_holds_its_number_of_labels(
    labels: Tensor, clients: int, data: st.DataObject, seed: int
) -> None:
    C = len(labels.unique())
    s = data.draw(st.integers(math.ceil(C / clients), C))
    parts = by_label(labels, clients, s, seed=seed)
    assert len(parts) == clients
    assert covers(parts, len(labels))
    counts = label_counts(parts, labels)
    held = counts > 0
    assert held.sum(1).tolist() == [s] * clients
    assert all(held[i, i % C] for i in range(clients))
    holders = held.sum(0)
    assert set(holders.tolist()) <= {clients * s // C, math.ceil(clients * s / C)}
    for j in range(C):
        shares = counts[:, j][held[:, j]]
        assert shares.max() - shares.min() <= 1


def test_one_label_each_is_dealt_in_turn() -> None:
    for seed in range(3):
        held = label_counts(by_label(TEN, 23, 1, seed=seed), TEN).argmax(1)
        assert held.tolist() == [i % 10 for i in range(23)]


def test_two_labels_among_four_clients() -> None:
    adult = [0] * 75 + [1] * 25
    counts = label_counts(by_label(adult, 4, 1), adult).tolist()
    assert sorted(counts[0::2]) == [[37, 0], [38, 0]]
    assert sorted(counts[1::2]) == [[0, 12], [0, 13]]


def test_the_other_labels_are_random() -> None:
    others: list[set[int]] = [set() for _ in range(10)]
    for seed in range(100):
        for i, counts in enumerate(label_counts(by_label(TEN, 10, 2, seed=seed), TEN)):
            (other,) = set(counts.nonzero().flatten().tolist()) - {i}
            others[i].add(other)
    # Each of nine is missed by 100 draws with probability 7e-6.
    assert all(seen == set(range(10)) - {i} for i, seen in enumerate(others))


def test_who_gets_one_sample_more_is_random() -> None:
    labels = [0] * 5
    first = [by_label(labels, 2, 1, seed=seed).sizes[0] for seed in range(64)]
    assert set(first) == {2, 3}


def test_every_balanced_number_of_holders_can_be_dealt() -> None:
    # The search for who swaps with whom must not fail, whichever labels have one holder more.
    for C in range(2, 6):
        for m in range(1, 12):
            for s in range(max(2, math.ceil(C / m)), C + 1):
                base, more = divmod(m * s, C)
                for chosen in combinations(range(C), more):
                    holders = [base + (j in chosen) for j in range(C)]
                    held = partition._deal(holders, m, s, seed=m)
                    assert all(len(set(shares)) == s for shares in held)
                    assert [sum(j in shares for shares in held) for j in range(C)] == holders


def test_many_labels_are_dealt_to_many_clients() -> None:
    labels = torch.arange(20_000) % 200
    counts = label_counts(by_label(labels, 200, 7), labels)
    assert set((counts > 0).sum(1).tolist()) == set((counts > 0).sum(0).tolist()) == {7}


def test_a_rare_label_is_left_to_fewer_clients() -> None:
    # 4 * 2 / 3 holders: two or three, and label 0 has samples for two.
    labels = [0] * 2 + [1] * 9 + [2] * 9
    for seed in range(20):
        counts = label_counts(by_label(labels, 4, 2, seed=seed), labels)
        assert (counts > 0).sum(0).tolist() == [2, 3, 3]


# Shares from a Dirichlet distribution


@property_test
@given(
    labels=unbalanced(),
    clients=st.integers(1, 5),
    alpha=st.floats(0.3, 100),
    smallest=st.integers(1, 3),
    seed=seeds,
)
def test_dirichlet_covers_and_leaves_nobody_with_too_little(
    labels: Tensor, clients: int, alpha: float, smallest: int, seed: int
) -> None:
    assume(len(labels) >= 10 * clients * smallest)
    parts = dirichlet(labels, clients, alpha, seed=seed, smallest=smallest)
    assert len(parts) == clients
    assert covers(parts, len(labels))
    assert min(parts.sizes) >= smallest


@property_test
@given(
    n=st.integers(100, 2000),
    clients=st.integers(1, 5),
    alpha=st.floats(0.3, 100),
    smallest=st.integers(1, 5),
    seed=seeds,
)
def test_quantities_cover_and_leave_nobody_with_too_little(
    n: int, clients: int, alpha: float, smallest: int, seed: int
) -> None:
    parts = by_quantity(n, clients, alpha, seed=seed, smallest=smallest)
    assert len(parts) == clients
    assert covers(parts, n)
    assert min(parts.sizes) >= smallest


def test_small_alpha_is_more_skewed() -> None:
    labels = torch.arange(20_000) % 10

    def of_labels(alpha: float) -> float:
        return sum(skew(dirichlet(labels, 10, alpha, seed=k), labels) for k in range(20)) / 20

    def of_sizes(alpha: float) -> float:
        return sum(max(by_quantity(labels, 10, alpha, seed=k).weights) for k in range(20)) / 20

    assert of_labels(0.1) > of_labels(1.0) + 0.1 > of_labels(10.0) + 0.2 > of_labels(1e4) + 0.25
    assert of_labels(1e4) < 0.02
    assert of_sizes(0.2) > of_sizes(1.0) + 0.1 > of_sizes(10.0) + 0.2
    assert of_sizes(1e4) < 0.11


def test_quantity_skew_leaves_the_labels_alone() -> None:
    parts = by_quantity(TEN.repeat(100), 5, 0.5, seed=1, smallest=1000)
    assert max(parts.sizes) > 2 * min(parts.sizes)
    assert skew(parts, TEN.repeat(100)) < 0.05


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_shares_have_the_moments_of_the_distribution(alpha: float) -> None:
    # Mean 1/m and variance (m - 1) / (m^2 (m alpha + 1)), for m = 4.
    source = random.Random(0)
    draws = [partition._shares([alpha] * 4, source) for _ in range(2000)]
    shares = torch.tensor(draws, dtype=torch.float64)
    variance = 3 / (16 * (4 * alpha + 1))
    assert (shares.mean(0) - 0.25).abs().max() < 5 * math.sqrt(variance / 2000)
    assert (shares.var(0) / variance - 1).abs().max() < 0.15


def test_the_smallest_alpha_does_not_underflow() -> None:
    # One client gets all of a label; over many labels every client gets some.
    labels = torch.arange(5000) % 100
    counts = label_counts(dirichlet(labels, 5, 1e-6), labels)
    assert ((counts > 0).sum(0) == 1).all()


# All of them


@given(unbalanced(least=3), st.integers(1, 20), st.floats(1e-3, 1e3), seeds)
@property_test
def test_mixtures_cover_in_equal_sizes(
    labels: Tensor, clients: int, alpha: float, seed: int
) -> None:
    assume(clients <= len(labels))
    parts = by_mixture(labels, clients, alpha, seed=seed)
    assert covers(parts, len(labels))
    assert max(parts.sizes) - min(parts.sizes) <= 1


def test_mixtures_of_many_clients() -> None:
    """Of thousands with a few samples each nobody is without; the labels follow the mixture."""
    labels = torch.arange(6000) % 10
    few, all_ten = (by_mixture(labels, 1000, alpha) for alpha in (0.1, 1e6))
    assert set(few.sizes) == {6}
    held = (label_counts(few, labels) > 0).sum(1).double()
    assert float(held.mean()) < 1.5
    # Six draws with equal shares: ten labels, of which each is missing with 0.9^6.
    held = (label_counts(all_ten, labels) > 0).sum(1).double()
    assert float(held.mean()) == pytest.approx(10 * (1 - 0.9**6), rel=0.03)


def test_mixtures_have_the_moments_of_the_distribution() -> None:
    """Shares of large clients of few: mean p and variance p (1 - p) / (alpha + 1)."""
    labels = torch.tensor([0] * 30_000 + [1] * 70_000)
    parts = by_mixture(labels, 300, 3.0, sizes=[100] * 300)
    shares = label_counts(parts, labels)[:, 0].double() / 100
    drawn = 0.3 * 0.7 / 4 * (1 - 1 / 100) + 0.3 * 0.7 / 100
    assert float(shares.mean()) == pytest.approx(0.3, abs=0.03)
    assert float(shares.var()) == pytest.approx(drawn, rel=0.25)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_mixtures_of_given_sizes(kind: Any) -> None:
    sizes = [1, 50, 3, 200]
    parts = by_mixture(TEN, 4, 0.2, sizes=kind(sizes))
    assert list(parts.sizes) == sizes
    assert len(set(chain(*as_lists(parts)))) == sum(sizes)


def test_owners_have_what_is_theirs() -> None:
    owners = ["b", "a", "b", None, ("c", 1), "a", "b"]
    assert as_lists(by_owner(owners)) == [[0, 2, 6], [1, 5], [3], [4]]
    assert as_lists(by_owner(owners, smallest=2)) == [[0, 2, 6], [1, 5]]
    assert as_lists(by_owner(iter([3, 3, 1]))) == [[0, 1], [2]]
    assert as_lists(by_owner(torch.tensor([3, 3, 1]))) == [[0, 1], [2]]
    assert as_lists(by_owner(list(torch.tensor([3, 3, 1])))) == [[0, 1], [2]]
    assert as_lists(by_owner(np.array([3, 3, 1]))) == [[0, 1], [2]]


WAYS: dict[str, Callable[[int], Parts]] = {
    "by_mixture": lambda seed: by_mixture(TEN, 7, 1.0, seed=seed),
    "iid": lambda seed: iid(600, 10, seed=seed),
    "one label": lambda seed: by_label(TEN, 20, 1, seed=seed),
    "two labels": lambda seed: by_label(TEN, 10, 2, seed=seed),
    "dirichlet": lambda seed: dirichlet(TEN, 10, 0.5, seed=seed),
    "by_quantity": lambda seed: by_quantity(600, 10, 1.0, seed=seed),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_parts_are_decided_by_the_seed(way: Callable[[int], Parts]) -> None:
    before = torch.get_rng_state()
    first = as_lists(way(1))
    assert first != as_lists(way(2))
    with torch.device("meta"):
        assert first == as_lists(way(1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("parts", "digest"),
    [
        (lambda: by_label(TEN, 10, 3, seed=4), "ca3f40346edcd32c"),
        (lambda: dirichlet(TEN, 10, 0.5, seed=4), "d2d5d001a23a8667"),
        (lambda: by_quantity(600, 10, 1.0, seed=4), "fa7f0ddef1d66364"),
    ],
    ids=["by_label", "dirichlet", "by_quantity"],
)
def test_parts_are_the_same_in_every_process(parts: Callable[[], Parts], digest: str) -> None:
    """On every machine and in every version: what was computed once."""
    actual = hashlib.sha256(str(as_lists(parts())).encode()).hexdigest()
    assert actual.startswith(digest)


def test_iid_is_split() -> None:
    assert as_lists(iid(TEN, 7, seed=3)) == as_lists(split(600, 7, seed=3))


def test_quantities_take_data_or_its_length() -> None:
    assert as_lists(by_quantity(TEN, 7, 1.0)) == as_lists(by_quantity(600, 7, 1.0))


def test_labels_are_any_integers() -> None:
    numpy = pytest.importorskip("numpy")
    expected = as_lists(by_label(TEN, 5, 4)), as_lists(dirichlet(TEN, 5, 1.0))
    for labels in (TEN.tolist(), TEN.to(torch.uint8), 3 * TEN - 7, numpy.array(TEN.tolist())):
        assert (as_lists(by_label(labels, 5, 4)), as_lists(dirichlet(labels, 5, 1.0))) == expected


def test_counts_of_labels() -> None:
    parts = Parts.from_indices([[5, 0], [2, 3]])  # 1 and 4 are with nobody
    assert label_counts(parts, [9, 9, -1, 9, 4, 9]).tolist() == [[0, 0, 2], [1, 0, 1]]


# Noise


def test_noise_levels_rise_to_the_largest() -> None:
    assert noise_levels(1, 0.3) == (0.3,)
    assert noise_levels(5, 10) == (2.0, 4.0, 6.0, 8.0, 10.0)


def test_noise_has_its_variance() -> None:
    inputs = torch.linspace(-1, 1, 40_000, dtype=torch.float64).view(200, 200)
    kept = inputs.clone()
    noise = add_noise(inputs, 0.09) - inputs
    assert torch.equal(inputs, kept)
    assert abs(float(noise.mean())) < 5 * 0.3 / 200
    assert abs(float(noise.var()) / 0.09 - 1) < 0.04
    assert torch.equal(add_noise(inputs, 0), inputs)


def test_noise_is_decided_by_seed_and_client() -> None:
    zeros = torch.zeros(20)
    drawn = [add_noise(zeros, 1.0, client=c, seed=s) for c, s in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert all(not torch.equal(a, b) for a, b in combinations(drawn, 2))
    torch.manual_seed(7)
    assert torch.equal(add_noise(zeros, 1.0, client=1), drawn[1])
    # The level scales it: more noise, not other noise.
    torch.testing.assert_close(add_noise(zeros, 4.0, client=1), 2 * drawn[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_noise_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert add_noise(torch.zeros(3, 2, dtype=dtype), 0.1).dtype == dtype


# Errors


BAD: Any = None  # for arguments that a checker would refuse
ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (
        lambda: by_owner([1, 1, 2], smallest=3),
        ValueError,
        "smallest must be at most 2 (the most of one owner), got 3",
    ),
    (lambda: by_owner([]), ValueError, "owners must hold the owner of at least one sample"),
    (
        lambda: by_owner(5),
        TypeError,
        "owners must be one owner per sample that can be hashed, got 5",
    ),  # type: ignore[arg-type]
    (
        lambda: by_owner([[1], [2]]),
        TypeError,
        "owners must be one owner per sample that can be hashed, got [[1], [2]]: unhashable",
    ),  # type: ignore[list-item]
    (lambda: by_owner(torch.zeros(3, 2)), TypeError, "owners must be one owner per sample that"),
    (lambda: by_mixture(TEN, 2, 0.0), ValueError, "alpha must be a finite number > 0, got 0.0"),
    (lambda: by_mixture(TEN, 601, 1.0), ValueError, "clients must be at most 600"),
    (
        lambda: by_mixture(TEN, 2, 1.0, sizes=[5]),
        ValueError,
        "sizes must hold a number for each of 2 clients, got 1",
    ),
    (
        lambda: by_mixture(TEN, 2, 1.0, sizes=[5, 0]),
        ValueError,
        "sizes[1] must be an integer >= 1, got 0",
    ),
    (
        lambda: by_mixture(TEN, 2, 1.0, sizes=[5, 600]),
        ValueError,
        "sizes must add up to at most 600 (the samples), got 605",
    ),
    (
        lambda: by_mixture(TEN, 2, 1.0, sizes=20),  # type: ignore[arg-type]
        TypeError,
        "sizes must be one number per client, got 20",
    ),
    (
        lambda: iid((torch.zeros(600, 4), TEN), 2),
        TypeError,
        "data must be a dataset or its length, got a pair of arrays",
    ),
    (
        lambda: by_quantity([np.zeros((600, 4)), np.zeros(600)], 2, 1.0),
        TypeError,
        "data must be a dataset or its length, got a pair of arrays: give one of them",
    ),
    (lambda: iid(5, 6), ValueError, "clients must be at most 5 (5 samples, at least 1 per client)"),
    (lambda: iid(5, 0), ValueError, "clients must be an integer >= 1, got 0"),
    (lambda: iid(5, 2, seed=-1), ValueError, "seed must be an integer >= 0, got -1"),
    (
        lambda: by_label(["cat", "dog"], 2, 1),  # type: ignore[list-item]
        TypeError,
        "labels must be a sequence of integers, got ['cat', 'dog']",
    ),
    (
        lambda: by_label(torch.zeros(4), 2, 1),
        TypeError,
        "labels must be a sequence of integers, got torch.float32 of shape (4,)",
    ),
    (
        lambda: dirichlet(torch.zeros(4, 2, dtype=torch.int64), 2, 1.0),
        TypeError,
        "labels must be a sequence of integers, got torch.int64 of shape (4, 2)",
    ),
    (lambda: by_label([], 2, 1), ValueError, "labels must hold at least one label, got none"),
    (lambda: by_label(TEN, 2.0, 5), ValueError, "clients must be an integer >= 1, got 2.0"),  # type: ignore[arg-type]
    (lambda: by_label([0, 1], 3, 1), ValueError, "clients must be at most 2 (2 samples"),
    (lambda: by_label(TEN, 10, 0), ValueError, "labels_per_client must be an integer >= 1, got 0"),
    (
        lambda: by_label(TEN, 10, 11),
        ValueError,
        "labels_per_client must be at most 10 (the number of labels), got 11",
    ),
    (
        lambda: by_label(TEN, 4, 2),
        ValueError,
        "labels_per_client must be at least 3, so that 4 clients hold all 10 labels, got 2",
    ),
    (
        lambda: by_label([5] * 20 + [7], 4, 1),
        ValueError,
        "labels must have a sample of each label for every client that holds it, got 1 of label 7 "
        "for 2 clients: lower clients or labels_per_client",
    ),
    (lambda: by_label(TEN, 10, 2, seed=BAD), ValueError, "seed must be an integer >= 0, got None"),
    (lambda: dirichlet(TEN, 10, 0.0), ValueError, "alpha must be a finite number > 0, got 0.0"),
    (
        lambda: by_quantity(600, 10, math.inf),
        ValueError,
        "alpha must be a finite number > 0, got inf",
    ),
    (
        lambda: by_quantity(600, 10, 1.0, smallest=0),
        ValueError,
        "smallest must be an integer >= 1, got 0",
    ),
    (
        lambda: dirichlet(TEN, 10, 1.0, smallest=61),
        ValueError,
        "clients must be at most 9 (600 samples, at least 61 per client), got 10",
    ),
    (lambda: dirichlet(TEN, 10, 1.0, seed=-1), ValueError, "seed must be an integer >= 0, got -1"),
    (lambda: by_quantity(-3, 1, 1.0), ValueError, "data without a length must be an integer >= 1"),
    (
        lambda: label_counts(Parts.from_indices([[0, 9]]), [0, 1]),
        ValueError,
        "labels must hold one label per sample, up to index 9 of parts, got 2 labels",
    ),
    (lambda: noise_levels(0, 1.0), ValueError, "clients must be an integer >= 1, got 0"),
    (lambda: noise_levels(3, -1.0), ValueError, "largest must be a finite number >= 0, got -1.0"),
    (
        lambda: add_noise(TEN, 0.1),
        TypeError,
        "inputs must be a floating-point tensor, got torch.int64",
    ),
    (lambda: add_noise(BAD, 0.1), TypeError, "inputs must be a floating-point tensor, got None"),
    (
        lambda: add_noise(torch.zeros(2), -0.1),
        ValueError,
        "level must be a finite number >= 0, got -0.1",
    ),
    (
        lambda: add_noise(torch.zeros(2), 0.1, client=-1),
        ValueError,
        "client must be an integer >= 0, got -1",
    ),
    (
        lambda: add_noise(torch.zeros(2), 0.1, seed=-1),
        ValueError,
        "seed must be an integer >= 0, got -1",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors_say_what_is_legal(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match="^" + re.escape(message)):
        call()


@pytest.mark.parametrize(
    "way",
    [
        lambda: dirichlet(TEN, 10, 0.01, smallest=59),
        lambda: by_quantity(600, 10, 0.01, smallest=59),
    ],
)
def test_giving_up_says_what_to_change(
    way: Callable[[], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "MAX_SHARES", 1000)
    message = (
        r"^alpha must be larger for 10 clients of at least 59 samples, got 0\.01: none of "
        r"(10|100) draws gave each that many \(or lower clients or smallest\)$"
    )
    with pytest.raises(ValueError, match=message):
        way()


def test_area_of_a_disc_is_the_number_of_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    collections = pytest.importorskip("matplotlib.collections")
    discs: dict[tuple[int, int], float] = {}
    made = collections.EllipseCollection

    def record(widths: list[float], *rest: Any, offsets: list[list[int]], **others: Any) -> Any:
        discs.update({(i, j): w for (i, j), w in zip(offsets, widths, strict=True)})
        return made(widths, *rest, offsets=offsets, **others)

    monkeypatch.setattr(collections, "EllipseCollection", record)
    parts = Parts.from_indices([[0, 1, 2, 3], [4]])
    draw(parts, [0, 0, 0, 0, 1], tmp_path / "who.svg")
    assert discs.keys() == {(0, 0), (1, 1)}
    assert discs[0, 0] == pytest.approx(2 * discs[1, 1])


def test_missing_matplotlib_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'torchpisa[demo]'")):
        draw(iid(TEN, 2), TEN, tmp_path / "who.svg")
