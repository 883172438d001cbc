"""Parts, rounds and cuts of data: what Algorithm 1 asks of them, and every message."""

import dataclasses
import math
import pickle
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from torchpisa.data import Parts, RoundSampler, split, split_batch

# DataLoader's workers on a machine with one core, and fork beside torch's threads (Python 3.12).
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]

property_test = settings(deadline=None, max_examples=60)


def as_lists(parts: Parts) -> list[list[int]]:
    return [part.tolist() for part in parts.indices]


def endless(sampler: RoundSampler) -> Iterator[list[int]]:
    """Yield epoch after epoch."""
    while True:
        yield from sampler


@st.composite
def samplers(draw: st.DrawFn) -> Callable[..., RoundSampler]:
    """Return a function that makes the same sampler: unequal parts, unequal mini-batches."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    batch_size = [draw(st.integers(1, size)) for size in sizes]
    rounds = draw(st.none() | st.integers(1, 5))
    seed = draw(st.integers(0, 2**70))
    parts = split(sum(sizes), len(sizes), sizes=sizes, seed=seed)

    def make(**changes: Any) -> RoundSampler:
        return RoundSampler(parts, batch_size, rounds=rounds, **{"seed": seed, **changes})

    return make


# Parts


@property_test
@given(n=st.integers(1, 200), data=st.data(), shuffle=st.booleans(), seed=st.integers(0, 2**70))
def test_split_is_disjoint_equal_and_covers(
    n: int, data: st.DataObject, shuffle: bool, seed: int
) -> None:
    m = data.draw(st.integers(1, n))
    parts = split(n, m, shuffle=shuffle, seed=seed)
    assert sorted(chain(*as_lists(parts))) == list(range(n))
    assert len(parts) == len(parts.indices) == m
    assert parts.sizes == tuple(len(part) for part in as_lists(parts))
    assert max(parts.sizes) - min(parts.sizes) <= 1
    assert all(part.dtype == torch.int64 for part in parts.indices)


@property_test
@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_weights_are_the_shares_of_the_data(counts: list[int]) -> None:
    parts = split(sum(counts), len(counts), sizes=counts)
    assert parts.sizes == tuple(counts)
    assert parts.weights == tuple(count / sum(counts) for count in counts)
    assert math.isclose(math.fsum(parts.weights), 1.0, rel_tol=1e-15)
    assert sorted(chain(*as_lists(parts))) == list(range(sum(counts)))


def test_weighted_means_of_the_parts_are_the_mean_of_the_data() -> None:
    # What (2.1) is for: sum_i alpha_i H_i is the loss on D.
    loss = torch.randn(97, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = split(loss, 3, sizes=[0.7, 0.2, 0.1])
    total = sum(a * loss[part].mean() for a, part in zip(parts.weights, parts.indices, strict=True))
    torch.testing.assert_close(total, loss.mean(), rtol=1e-14, atol=1e-15)


@property_test
@given(raw=st.lists(st.integers(1, 20), min_size=1, max_size=8), n=st.integers(200, 10_000))
def test_fractions_are_rounded_to_cover(raw: list[int], n: int) -> None:
    fractions = [size / sum(raw) for size in raw]
    parts = split(n, len(raw), sizes=fractions)
    assert sum(parts.sizes) == n
    for size, fraction in zip(parts.sizes, fractions, strict=True):
        assert abs(size - n * fraction) <= 1 + 1e-9


def test_fractions_that_add_up_to_one_only_nearly_still_cover() -> None:
    parts = split(4_000_000, 2, sizes=[0.3, 0.7000005], shuffle=False)  # two samples too many
    assert sum(parts.sizes) == 4_000_000


def test_split_is_decided_by_its_seed() -> None:
    assert as_lists(split(50, 3, seed=1)) != as_lists(split(50, 3, seed=2))
    assert as_lists(split(50, 3)) == as_lists(split(50, 3, seed=0))
    assert as_lists(split(6, 2, shuffle=False)) == [[0, 1, 2], [3, 4, 5]]


def test_split_deals_every_sample_to_every_part() -> None:
    first = Counter(chain(*(as_lists(split(6, 3, seed=seed))[0] for seed in range(900))))
    assert first.total() == 1800
    # 300 each in expectation, standard deviation 14.
    assert all(abs(first[sample] - 300) < 60 for sample in range(6))


def test_split_takes_a_dataset_or_its_length() -> None:
    dataset = TensorDataset(torch.arange(20))
    assert as_lists(split(dataset, 3)) == as_lists(split(20, 3)) == as_lists(split(range(20), 3))


def test_subset_reads_one_part() -> None:
    values = torch.arange(10) * 10
    parts = Parts.from_indices([[7, 2], [3, 4, 5]])
    subset = parts.subset(TensorDataset(values), 1)
    assert [int(subset[j][0]) for j in range(len(subset))] == [30, 40, 50]
    assert all(type(index) is int for index in subset.indices)


def test_from_indices_takes_any_sequence_of_integers() -> None:
    numpy = pytest.importorskip("numpy")
    given_parts: list[Any] = [[4, 1], (0,), range(5, 8), torch.tensor([9, 8], dtype=torch.int32)]
    parts = Parts.from_indices([*given_parts, numpy.array([20])])
    assert as_lists(parts) == [[4, 1], [0], [5, 6, 7], [9, 8], [20]]
    assert parts.weights == (2 / 9, 1 / 9, 3 / 9, 2 / 9, 1 / 9)  # of the nine, not of range(21)
    assert repr(parts) == "Parts(sizes=(2, 1, 3, 2, 1))"


def test_parts_do_not_change() -> None:
    mine = torch.tensor([0, 1])
    parts = Parts.from_indices([mine])
    mine += 5
    assert as_lists(parts) == [[0, 1]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        parts.indices = ()  # type: ignore[misc]
    assert as_lists(pickle.loads(pickle.dumps(parts))) == [[0, 1]]


# Rounds


@property_test
@given(make=samplers())
def test_an_epoch_is_whole_rounds_of_full_mini_batches(make: Callable[..., RoundSampler]) -> None:
    sampler = make()
    m, owners = len(sampler.parts), [set(part) for part in as_lists(sampler.parts)]
    epoch = list(sampler)
    assert len(epoch) == len(sampler) == sampler.rounds * m
    for number, drawn in enumerate(epoch):
        assert len(drawn) == sampler.batch_size[number % m]
        assert set(drawn) <= owners[number % m]
        assert all(type(index) is int for index in drawn)


@property_test
@given(make=samplers())
def test_parts_are_read_in_passes_without_replacement(make: Callable[..., RoundSampler]) -> None:
    sampler = make()
    m = len(sampler.parts)
    drawn = list(islice(endless(sampler), 30 * m))
    for i, part in enumerate(as_lists(sampler.parts)):
        stream = list(chain(*drawn[i::m]))
        assert len(stream) == 30 * sampler.batch_size[i]
        for begin in range(0, len(stream) - len(part) + 1, len(part)):
            assert sorted(stream[begin : begin + len(part)]) == sorted(part)
        counts = Counter(stream)
        assert max(counts.values()) - min(counts[index] for index in part) <= 1


def test_a_part_that_runs_out_goes_on_with_its_next_pass() -> None:
    sampler = RoundSampler(Parts.from_indices([range(5)]), 3, rounds=5)
    first, second, third, fourth, fifth = sampler
    assert sorted(first + second[:2]) == sorted(second[2:] + third + fourth[:1]) == list(range(5))
    assert sorted(fourth[1:] + fifth) == list(range(5))
    assert first + second[:2] != second[2:] + third + fourth[:1]


def test_a_mini_batch_may_be_the_whole_part() -> None:
    for drawn in RoundSampler(split(6, 2), 3, rounds=4):
        assert len(set(drawn)) == 3


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_batch_sizes_may_be_an_array(make: Callable[[list[int]], Any]) -> None:
    assert RoundSampler(split(10, 2), make([2, 1])).batch_size == (2, 1)


@pytest.mark.parametrize(
    ("n", "m", "batch_size", "rounds"), [(100, 4, 5, 5), (101, 4, 5, 6), (10, 2, [2, 1], 4)]
)
def test_default_epoch_is_about_one_pass(
    n: int, m: int, batch_size: int | list[int], rounds: int
) -> None:
    sampler = RoundSampler(split(n, m), batch_size)
    assert sampler.rounds == rounds
    assert len(sampler) == rounds * m


@property_test
@given(m=st.integers(1, 5), batch_size=st.integers(1, 5), more=st.integers(0, 40))
def test_default_epoch_of_equal_parts_reads_everything(m: int, batch_size: int, more: int) -> None:
    n = m * batch_size + more
    assert set(chain(*RoundSampler(split(n, m), batch_size))) == set(range(n))


def test_orders_differ_between_seeds_parts_passes_and_epochs() -> None:
    def orders(seed: int) -> list[tuple[int, ...]]:
        # Parts alike up to an offset, and one round a pass.
        parts = Parts.from_indices([range(12), range(100, 112)])
        drawn = islice(endless(RoundSampler(parts, 12, seed=seed)), 8)
        return [tuple(index % 100 for index in batch) for batch in drawn]

    assert len({*orders(0), *orders(1), *orders(2)}) == 24


def test_every_place_in_a_pass_is_uniform() -> None:
    sampler = RoundSampler(Parts.from_indices([range(5)]), 5)
    passes = [sampler.draw(iteration, 0) for iteration in range(1000)]
    for place in zip(*passes, strict=True):
        # 200 each in expectation, standard deviation 12.6.
        assert all(abs(count - 200) < 55 for count in Counter(place).values())
    # 1000 passes over 120 permutations: a generator that repeats itself would miss many.
    assert len(set(map(tuple, passes))) == 120


@property_test
@given(make=samplers(), cut=st.integers(0, 25))
def test_resuming_anywhere_gives_the_undisturbed_order(
    make: Callable[..., RoundSampler], cut: int
) -> None:
    undisturbed = make()
    m, rounds = len(undisturbed.parts), undisturbed.rounds
    whole = list(islice(endless(undisturbed), (cut + 12) * m))
    resumed = make(start=cut)
    resumed.set_epoch(cut // rounds)  # as a trainer does; must not undo the resume
    rest_of_epoch = list(resumed)
    assert len(rest_of_epoch) == (rounds - cut % rounds) * m
    assert [*rest_of_epoch, *islice(endless(resumed), 12 * m)][: 12 * m] == whole[cut * m :]


@property_test
@given(make=samplers(), epoch=st.integers(0, 6))
def test_set_epoch_moves_to_that_epoch(make: Callable[..., RoundSampler], epoch: int) -> None:
    plain, moved = make(), make()
    epochs = [list(plain) for _ in range(epoch + 2)]
    for wanted in (epoch, epoch + 1, 0, epoch):
        moved.set_epoch(wanted)
        assert list(moved) == epochs[wanted]
    moved.set_epoch(epoch)
    moved.set_epoch(epoch)
    assert [list(moved), list(moved)] == epochs[epoch:]


@property_test
@given(make=samplers(), seen=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3))))
def test_draw_does_not_depend_on_what_was_drawn(
    make: Callable[..., RoundSampler], seen: list[tuple[int, int]]
) -> None:
    used = make()
    for iteration, part in seen:
        part %= len(used.parts)
        assert used.draw(iteration, part) == make().draw(iteration, part)


def test_an_epoch_counts_from_its_first_mini_batch() -> None:
    sampler = RoundSampler(split(12, 2), 2)  # 3 rounds an epoch
    iter(sampler)  # nothing drawn: nothing counted
    assert next(iter(sampler)) == sampler.draw(0, 0)
    assert next(iter(sampler)) == sampler.draw(3, 0)


def test_order_is_the_same_in_every_process() -> None:
    """On every machine and in every version: what was computed once."""
    first, second = as_lists(split(20, 2, seed=3))
    assert first == [19, 14, 16, 10, 13, 6, 8, 5, 1, 15]
    assert second == [4, 2, 0, 11, 7, 9, 17, 12, 18, 3]
    rounds = list(RoundSampler(split(20, 2), 4, seed=3))
    assert rounds[:3] == [[19, 16, 12, 10], [17, 7, 15, 9], [4, 1, 5, 2]]
    assert rounds[3:] == [[11, 0, 3, 6], [13, 8, 19, 2], [18, 14, 9, 18]]


def test_neither_default_device_nor_global_generator_matters() -> None:
    expected = as_lists(split(20, 2)), list(RoundSampler(split(20, 2), 4))
    before = torch.get_rng_state()
    with torch.device("meta"):
        assert (as_lists(split(20, 2)), list(RoundSampler(split(20, 2), 4))) == expected
        assert as_lists(split(4, 2, shuffle=False)) == [[0, 1], [2, 3]]
        assert as_lists(Parts.from_indices([[1, 0], range(2, 4)])) == [[1, 0], [2, 3]]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(
    params=[{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}],
    ids=["main", "workers", "persistent"],
)
def workers(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_loader_gives_the_slots_in_turn_epoch_after_epoch(workers: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.arange(30))
    parts = split(dataset, 3, sizes=[15, 10, 5], seed=1)
    sampler = RoundSampler(parts, [4, 3, 2], seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, **workers)
    assert len(loader) == 12  # ceil(30 / 9) rounds of 3
    loaded = [x.tolist() for _ in range(3) for (x,) in loader]
    assert loaded == [sampler.draw(number, part) for number in range(12) for part in range(3)]
    for number, drawn in enumerate(loaded):
        assert set(drawn) <= set(parts.indices[number % 3].tolist())


def test_breaking_out_of_a_loader_does_not_depend_on_its_workers(workers: dict[str, Any]) -> None:
    dataset = TensorDataset(torch.arange(40))
    sampler = RoundSampler(split(dataset, 2), 2)  # 10 rounds an epoch
    loader = DataLoader(dataset, batch_sampler=sampler, **workers)
    for _ in loader:
        break
    (x,) = next(iter(loader))
    assert x.tolist() == sampler.draw(10, 0)


# Cuts of a batch


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: a UserDict with something beside its items."""

    def __init__(self, data: dict[str, Tensor], n_sequences: int) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences


@property_test
@given(n=st.integers(1, 60), data=st.data())
def test_cuts_are_equal_ordered_views(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, n))
    x = torch.arange(2 * n).view(n, 2)
    cuts = split_batch(x, m)
    assert len(cuts) == m
    assert max(map(len, cuts)) - min(map(len, cuts)) <= 1
    assert torch.equal(torch.cat(cuts), x)
    storage = x.untyped_storage().data_ptr()
    assert all(cut.untyped_storage().data_ptr() == storage for cut in cuts)


def test_cuts_keep_the_structure() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    encoding = Encoding({"ids": x, "mask": y}, n_sequences=1)
    batch: dict[str, Any] = {
        "list": [x, (y, x)],
        "pair": Pair(x, y),
        "ordered": OrderedDict(b=x, a=y),
        "default": defaultdict(list, {0: y}),
        "encoding": encoding,
    }
    first, second = split_batch(batch, 2)
    assert list(first) == list(second) == list(batch)
    for part, rows in ((first, slice(0, 3)), (second, slice(3, 5))):
        assert type(part["list"]) is list
        assert type(part["list"][1]) is tuple
        assert isinstance(part["pair"], Pair)
        assert isinstance(part["ordered"], OrderedDict)
        assert list(part["ordered"]) == ["b", "a"]
        assert isinstance(part["default"], defaultdict)
        assert part["default"].default_factory is list
        assert isinstance(part["encoding"], Encoding)
        assert part["encoding"].n_sequences == 1
        for tensor in (part["list"][0], part["list"][1][1], part["pair"].x, part["ordered"]["b"]):
            assert torch.equal(tensor, x[rows])
        for tensor in (part["list"][1][0], part["pair"].y, part["default"][0]):
            assert torch.equal(tensor, y[rows])
        assert torch.equal(part["encoding"]["ids"], x[rows])
        assert torch.equal(part["encoding"]["mask"], y[rows])
    assert batch["encoding"] is encoding  # what was passed in is as it was
    assert encoding["ids"] is x
    assert batch["list"][0] is x


def test_gradients_flow_through_the_cuts() -> None:
    x = torch.ones(4, requires_grad=True)
    first, second = split_batch((x,), 2)
    (grad,) = torch.autograd.grad(first[0].sum() + 3 * second[0].sum(), x)
    assert grad.tolist() == [1, 1, 3, 3]


# Messages


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __repr__(self) -> str:
        return "Stream()"


PARTS = split(10, 3)
ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    # split
    (lambda: split(5, 0), ValueError, "batches must be an integer >= 1, got 0"),
    (
        lambda: split(5, 2.0),  # type: ignore[arg-type]
        ValueError,
        "batches must be an integer >= 1, got 2.0",
    ),
    (lambda: split(5, True), ValueError, "batches must be an integer >= 1, got True"),
    (lambda: split(5, 6), ValueError, "batches must be at most 5 (the number of samples), got 6"),
    (lambda: split([], 1), ValueError, "batches must be at most 0 (the number of samples), got 1"),
    (lambda: split(0, 1), ValueError, "data without a length must be an integer >= 1, got 0"),
    (
        lambda: split(Stream(), 1),
        ValueError,
        "data without a length must be an integer >= 1, got Stream()",
    ),
    (
        lambda: split(DataLoader(list(range(8)), batch_size=4), 2),
        TypeError,
        "data must be samples, got a DataLoader, which has batches: pass .dataset",
    ),
    (
        lambda: split((torch.zeros(8, 3), torch.arange(8)), 2),
        TypeError,
        "data must be a dataset or its length, got a pair of arrays: give one of them",
    ),
    (lambda: split(5, 2, seed=-1), ValueError, "seed must be an integer >= 0, got -1"),
    (
        lambda: split(5, 2, sizes=[5]),
        ValueError,
        "sizes must hold one number per part, 2, got 1",
    ),
    (lambda: split(5, 2, sizes=[2, 2]), ValueError, "sizes as counts must add up to 5, got 4"),
    (
        lambda: split(5, 2, sizes=[0.5, 0.25]),
        ValueError,
        "sizes as fractions must add up to 1, got 0.75",
    ),
    (
        lambda: split(5, 2, sizes=[math.nan, 0.5]),
        ValueError,
        "sizes as fractions must add up to 1, got nan",
    ),
    (
        lambda: split(5, 2, sizes=[5, 0]),
        ValueError,
        "sizes must leave no part empty, got [5, 0], that is [5, 0] samples",
    ),
    (
        lambda: split(5, 2, sizes=[-1, 6]),
        ValueError,
        "sizes must leave no part empty, got [-1, 6], that is [-1, 6] samples",
    ),
    (
        lambda: split(5, 2, sizes=[0.99, 0.01]),
        ValueError,
        "sizes must leave no part empty, got [0.99, 0.01], that is [5, 0] samples",
    ),
    # Parts
    (
        lambda: Parts.from_indices([]),
        ValueError,
        "indices must hold at least one part, got none",
    ),
    (
        lambda: Parts.from_indices([[0], []]),
        ValueError,
        "indices of part 1 must hold at least one index, got none",
    ),
    (
        lambda: Parts.from_indices([[0, -3]]),
        ValueError,
        "indices of part 0 must be integers >= 0, got -3",
    ),
    (
        lambda: Parts.from_indices([[0, 5], [1], [5, 2]]),
        ValueError,
        "indices must be disjoint, got 5 in parts [0, 2]",
    ),
    (
        lambda: Parts.from_indices([[0], [7, 1, 7]]),
        ValueError,
        "indices must be disjoint, got 7 twice in part 1",
    ),
    (
        lambda: Parts((torch.tensor([1, 1]),)),
        ValueError,
        "indices must be disjoint, got 1 twice in part 0",
    ),
    (
        lambda: Parts.from_indices([[0.5]]),  # type: ignore[list-item]
        TypeError,
        "indices of part 0 must be a sequence of integers, got torch.float32 of shape (1,)",
    ),
    (
        lambda: Parts.from_indices([torch.tensor([True, False])]),
        TypeError,
        "indices of part 0 must be a sequence of integers, got torch.bool of shape (2,)",
    ),
    (
        lambda: Parts.from_indices([torch.tensor([[1]])]),
        TypeError,
        "indices of part 0 must be a sequence of integers, got torch.int64 of shape (1, 1)",
    ),
    (
        lambda: Parts.from_indices([3]),  # type: ignore[list-item]
        TypeError,
        "indices of part 0 must be a sequence of integers, got torch.int64 of shape ()",
    ),
    (
        lambda: Parts.from_indices([["a"]]),  # type: ignore[list-item]
        TypeError,
        "indices of part 0 must be a sequence of integers, got ['a']",
    ),
    (
        lambda: PARTS.subset(TensorDataset(torch.arange(10)), 3),
        ValueError,
        "part must be at most 2 (the last part), got 3",
    ),
    (
        lambda: PARTS.subset(TensorDataset(torch.arange(10)), -1),
        ValueError,
        "part must be an integer >= 0, got -1",
    ),
    # RoundSampler
    (
        lambda: RoundSampler([[0], [1]], 1),  # type: ignore[arg-type]
        TypeError,
        "parts must be a Parts (see split), got list",
    ),
    (
        lambda: RoundSampler(PARTS, [3, 3]),
        ValueError,
        "batch_size must be 1 or 3 integers, got 2",
    ),
    (lambda: RoundSampler(PARTS, 0), ValueError, "batch_size must be an integer >= 1, got 0"),
    (
        lambda: RoundSampler(PARTS, [3, 3, 0.5]),  # type: ignore[list-item]
        ValueError,
        "batch_size must be an integer >= 1, got 0.5",
    ),
    (
        lambda: RoundSampler(PARTS, 4),
        ValueError,
        "batch_size must be at most 3 (the size of part 1), got 4",
    ),
    (
        lambda: RoundSampler(PARTS, 1, rounds=0),
        ValueError,
        "rounds must be an integer >= 1, got 0",
    ),
    (
        lambda: RoundSampler(PARTS, 1, seed=None),  # type: ignore[arg-type]
        ValueError,
        "seed must be an integer >= 0, got None",
    ),
    (
        lambda: RoundSampler(PARTS, 1, start=-2),
        ValueError,
        "start must be an integer >= 0, got -2",
    ),
    (
        lambda: RoundSampler(PARTS, 1).set_epoch(-1),
        ValueError,
        "epoch must be an integer >= 0, got -1",
    ),
    (
        lambda: RoundSampler(PARTS, 1).draw(-1, 0),
        ValueError,
        "iteration must be an integer >= 0, got -1",
    ),
    (
        lambda: RoundSampler(PARTS, 1).draw(0, 3),
        ValueError,
        "part must be at most 2 (the last part), got 3",
    ),
    # split_batch
    (
        lambda: split_batch(torch.zeros(3), 0),
        ValueError,
        "batches must be an integer >= 1, got 0",
    ),
    (
        lambda: split_batch(torch.zeros(3), 4),
        ValueError,
        "batches must be at most 3 (the number of samples), got 4",
    ),
    (
        lambda: split_batch([torch.zeros(3), {"y": torch.zeros(2)}], 2),
        ValueError,
        "batch[0] and batch[1]['y'] must have one length, got 3 and 2",
    ),
    (
        lambda: split_batch((torch.zeros(3), torch.tensor(1.0)), 2),
        ValueError,
        "batch[1] must have a dimension to split, got a 0-d tensor",
    ),
    (
        lambda: split_batch({"x": torch.zeros(2), "text": ["a", "b"]}, 2),
        TypeError,
        "batch['text'][0] must be a tensor, or tuple, list or mapping of them, got str",
    ),
    (
        lambda: split_batch(Pair(torch.zeros(2), 3), 2),  # type: ignore[arg-type]
        TypeError,
        "batch[1] must be a tensor, or tuple, list or mapping of them, got int",
    ),
    (
        lambda: split_batch({"x": []}, 2),
        ValueError,
        "batch must hold at least one tensor, got {'x': []}",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[e[2] for e in ERRORS])
def test_errors_say_what_is_legal(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value) == message
