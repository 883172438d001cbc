r"""Data for Algorithm 1: the parts \(D_1, \ldots, D_m\) and the mini-batches \(B_i\).

The paper divides the data \(D\) into \(m\) disjoint parts, weighs part \(i\) by
\(\alpha_i = |D_i| / |D|\), equation (2.1), and in every round draws one mini-batch \(B_i\) from
each \(D_i\) in turn, equation (2.10). The optimizers take one `step()` per mini-batch:

    parts = split(dataset, batches=4, seed=0)
    loader = DataLoader(dataset, batch_sampler=RoundSampler(parts, batch_size=32, seed=0))
    opt = SISA(model.parameters(), batches=len(parts), weights=parts.weights)
    for x, y in loader:  # B_1, B_2, B_3, B_4, then the next round
        loss_fn(model(x), y).backward()
        opt.step()
        opt.zero_grad()

If the data comes as one large batch at a time, from a stream or from another loader, `split_batch`
divides that batch instead.
"""

import copy
import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

__all__ = ["Parts", "RoundSampler", "split", "split_batch"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # == on tensors is elementwise, so a generated __eq__ would raise
class Parts:
    r"""The parts \(D_1, \ldots, D_m\) of a dataset, made by `split` or `Parts.from_indices`.

    \(D\) is their union: samples in no part (held out, say) do not count in \(|D|\).

    Attributes:
        indices: for each \(D_i\) the indices of its samples (int64, one dimension, CPU).
    """

    indices: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        parts = tuple(_index_tensor(part, i) for i, part in enumerate(self.indices))
        object.__setattr__(self, "indices", parts)
        if not parts:
            raise ValueError("indices must hold at least one part, got none")
        ordered = torch.cat(parts).sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]].tolist()
        if repeated:
            owners = [i for i, part in enumerate(parts) if bool((part == repeated[0]).any())]
            where = f"in parts {owners}" if len(owners) > 1 else f"twice in part {owners[0]}"
            raise ValueError(f"indices must be disjoint, got {repeated[0]} {where}")

    @classmethod
    def from_indices(cls, indices: Sequence[Sequence[int] | Tensor]) -> "Parts":
        """Take a split made elsewhere: per part a list, range, tensor or array of indices.

        Raises:
            TypeError: a part is not a sequence of integers.
            ValueError: a part is empty, an index is negative, or an index occurs twice.
        """
        return cls(cast(tuple[Tensor, ...], tuple(indices)))

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        return f"Parts(sizes={self.sizes})"

    @property
    def sizes(self) -> tuple[int, ...]:
        r"""Return \(|D_i|\) of every part."""
        return tuple(part.numel() for part in self.indices)

    @property
    def weights(self) -> tuple[float, ...]:
        r"""Return \(\alpha_i = |D_i| / |D|\), equation (2.1), as the optimizers take them."""
        total = sum(self.sizes)
        return tuple(size / total for size in self.sizes)

    def subset(self, dataset: Dataset[Any], part: int) -> Subset[Any]:
        r"""Return \(D_i\) as a dataset, for a rank or client that holds one part (from 0)."""
        part = _integer("part", part, 0, len(self) - 1, "the last part")
        # A list, as torch's random_split makes: a tensor would hand 0-d tensors to the dataset.
        return Subset(dataset, self.indices[part].tolist())


def split(
    data: Dataset[Any] | Sized | int,
    batches: int,
    *,
    sizes: Sequence[float] | None = None,
    seed: int = 0,
    shuffle: bool = True,
) -> Parts:
    r"""Divide \(D\) into \(m\) disjoint parts that cover it.

    Args:
        data: \(D\), anything with a length, or \(|D|\) itself.
        batches: \(m\).
        sizes: \(|D_i|\), as \(m\) counts (integers that add up to \(|D|\)) or \(m\) fractions (that
            add up to 1; rounded so that the parts cover \(D\)). By default equal, the first parts
            one larger where \(m\) does not divide \(|D|\).
        seed: decides the shuffle; the same seed gives the same parts.
        shuffle: assign samples at random. False keeps their order, in contiguous blocks; if data
            are sorted by label the parts then differ as much as possible.

    Examples:
        >>> parts = split(10, batches=3)
        >>> parts
        Parts(sizes=(4, 3, 3))
        >>> parts.weights
        (0.4, 0.3, 0.3)
    """
    n = length(data)
    m = _integer("batches", batches, 1, n, "the number of samples")
    seed = _integer("seed", seed, 0)
    counts = _equal(n, m) if sizes is None else _counts(sizes, n, m)
    order = permutation(n, "split", seed) if shuffle else torch.arange(n, device="cpu")
    return Parts(torch.split(order, counts))


class RoundSampler(Sampler[list[int]]):
    r"""A `batch_sampler` that in every round draws \(B_1\) from \(D_1\), ..., \(B_m\) from \(D_m\).

    Each part is read in shuffled passes without replacement. A mini-batch at the end of a pass is
    filled from the next one. So every mini-batch is full, and the samples of a part are drawn
    equally often, give or take one. (A mini-batch of two passes may hold a sample twice, but not if
    \(|B_i|\) divides \(|D_i|\).)

    The order is a pure function of (seed, round, part). So nothing else needs saving, and a
    DataLoader may fetch ahead. To resume after r finished rounds, pass `start=r` (`opt.iteration`,
    if every round came from this sampler; save where `opt.synced`).

    Each iteration over the sampler is one epoch, and the next continues where it ended, with or
    without `set_epoch`, whatever `num_workers` and `persistent_workers` are: epoch e is the rounds
    from e * rounds to (e + 1) * rounds - 1. An epoch counts as soon as its first mini-batch is
    drawn, so after a `break` the next iteration is the next epoch. (The place of the break does not
    matter, because workers fetch ahead by different amounts.) With a `start` within an epoch the
    first iteration is the rest of that epoch; `len` is always that of a whole epoch.

    Args:
        parts: \(D_1, \ldots, D_m\).
        batch_size: \(|B_i|\), one for all parts or a sequence of \(m\), each at most \(|D_i|\).
            With one for all, small parts are read more often; \(\alpha_i\) compensates for it.
        rounds: rounds per epoch; by default \(\lceil |D| / \sum_i |B_i| \rceil\), about one pass.
        seed: seed of the order.
        start: the number of finished rounds. As an attribute: the round of the next iteration.
    """

    def __init__(
        self,
        parts: Parts,
        batch_size: int | Sequence[int],
        *,
        rounds: int | None = None,
        seed: int = 0,
        start: int = 0,
    ) -> None:
        if not isinstance(parts, Parts):
            raise TypeError(f"parts must be a Parts (see split), got {type(parts).__name__}")
        given = batch_size.tolist() if hasattr(batch_size, "tolist") else batch_size  # an array
        per_part = given if isinstance(given, Sequence) else [given] * len(parts)
        if len(per_part) != len(parts):
            raise ValueError(f"batch_size must be 1 or {len(parts)} integers, got {len(per_part)}")
        self.parts = parts
        self.batch_size = tuple(
            _integer("batch_size", b, 1, size, f"the size of part {i}")
            for i, (b, size) in enumerate(zip(per_part, parts.sizes, strict=True))
        )
        if rounds is None:
            rounds = math.ceil(sum(parts.sizes) / sum(self.batch_size))
        self.rounds = _integer("rounds", rounds, 1)
        self.seed = _integer("seed", seed, 0)
        self.start = _integer("start", start, 0)
        self._shuffled: dict[int, tuple[int, Tensor]] = {}  # part -> (pass, its order), a cache

    def __len__(self) -> int:
        return self.rounds * len(self.parts)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so this runs at the first next(): a DataLoader with workers calls iter()
        # twice for its first epoch and draws from one of the two.
        first = self.start
        self.start = last = (first // self.rounds + 1) * self.rounds
        for iteration in range(first, last):
            for part in range(len(self.parts)):
                yield self.draw(iteration, part)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, as DistributedSampler does; optional here.

        Trainers call it before every epoch. It changes nothing in the epoch of `start`, so that a
        resumed run stays where it was.
        """
        if _integer("epoch", epoch, 0) != self.start // self.rounds:
            self.start = epoch * self.rounds

    def draw(self, iteration: int, part: int) -> list[int]:
        r"""Return \(B_i^{\ell+1}\), equation (2.10); `iteration` and `part` count from 0."""
        iteration = _integer("iteration", iteration, 0)
        part = _integer("part", part, 0, len(self.parts) - 1, "the last part")
        b = self.batch_size[part]
        number, offset = divmod(iteration * b, len(self.parts.indices[part]))
        drawn = self._pass(part, number)[offset : offset + b]
        if len(drawn) < b:
            drawn = torch.cat([drawn, self._pass(part, number + 1)[: b - len(drawn)]])
        return cast(list[int], drawn.tolist())

    def _pass(self, part: int, number: int) -> Tensor:
        if part not in self._shuffled or self._shuffled[part][0] != number:
            indices = self.parts.indices[part]
            order = permutation(len(indices), "pass", self.seed, part, number)
            self._shuffled[part] = (number, indices[order])
        return self._shuffled[part][1]


def split_batch(batch: T, batches: int) -> list[T]:
    r"""Cut one large batch along dimension 0 into \(m\), as equal as possible, without copying.

    Each slot then gets new samples of all of \(D\). So leave the optimizer's `weights` equal, even
    if \(m\) does not divide the batch and some pieces are one sample larger.

    Args:
        batch: a tensor, or tuples, lists, named tuples and mappings (such as a tokenizer's
            BatchEncoding) of tensors of one length, nested as you like.
        batches: \(m\).

    Returns:
        \(m\) batches of the same structure, whose tensors are views.

    Examples:
        >>> x, y = torch.zeros(5, 3), torch.arange(5)
        >>> [part["y"].tolist() for part in split_batch({"x": x, "y": y}, 2)]
        [[0, 1, 2], [3, 4]]
    """
    lengths: dict[str, int] = {}

    def measure(path: str, tensor: Tensor) -> Tensor:
        if tensor.ndim == 0:
            raise ValueError(f"{path} must have a dimension to split, got a 0-d tensor")
        lengths[path] = tensor.shape[0]
        return tensor

    def cut(start: int, stop: int) -> T:
        return cast(T, _map(lambda _, tensor: tensor[start:stop], batch, "batch"))

    _map(measure, batch, "batch")
    if not lengths:
        raise ValueError(f"batch must hold at least one tensor, got {batch!r}")
    (path, n), *others = lengths.items()
    for other, length in others:
        if length != n:
            raise ValueError(f"{path} and {other} must have one length, got {n} and {length}")
    m = _integer("batches", batches, 1, n, "the number of samples")
    return [cut(start, stop) for start, stop in pairwise(accumulate(_equal(n, m), initial=0))]


def _map(f: Callable[[str, Tensor], Tensor], batch: Any, path: str) -> Any:
    """Apply f to every tensor (and its path, for messages) and keep the structure."""
    if isinstance(batch, Tensor):
        return f(path, batch)
    if isinstance(batch, Mapping):
        # A shallow copy, refilled, also keeps what a subclass holds beside its items.
        result: Any = copy.copy(batch)
        for key, value in batch.items():
            result[key] = _map(f, value, f"{path}[{key!r}]")
        return result
    if isinstance(batch, tuple | list):
        values = [_map(f, value, f"{path}[{j}]") for j, value in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    kind = type(batch).__name__
    raise TypeError(f"{path} must be a tensor, or tuple, list or mapping of them, got {kind}")


def length(data: Dataset[Any] | Sized | int) -> int:
    """Return the number of samples, given the data or that number itself."""
    if isinstance(data, DataLoader):
        raise TypeError("data must be samples, got a DataLoader, which has batches: pass .dataset")
    pair = isinstance(data, tuple | list) and len(data) == 2
    if pair and all(hasattr(part, "__array__") for part in cast(Sequence[Any], data)):
        raise TypeError(
            "data must be a dataset or its length, got a pair of arrays: give one of them"
        )
    if hasattr(data, "__len__"):
        return len(cast(Sized, data))
    return _integer("data without a length", data, 1)


def hashed(*key: str | int) -> int:
    """Return the seed of a generator for `key`, the same in every process."""
    # Hashed, not added up: neighbouring seeds, parts and passes must not share orders, and torch's
    # CPU generator reads only 32 bits of its seed. Python's hash() differs between processes.
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def permutation(n: int, *key: str | int) -> Tensor:
    """Return a random order of n samples, decided by `key`."""
    generator = torch.Generator().manual_seed(hashed(*key))
    # The device is explicit throughout this file, because the user may have set another default.
    return torch.randperm(n, generator=generator, device="cpu")


def _index_tensor(part: Sequence[int] | Tensor, i: int) -> Tensor:
    name = f"indices of part {i}"
    try:
        indices = torch.as_tensor(part, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a sequence of integers, got {part!r}") from None
    if indices.numel() == 0:
        raise ValueError(f"{name} must hold at least one index, got none")
    dtype = indices.dtype
    if indices.ndim != 1 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        shape = tuple(indices.shape)
        raise TypeError(f"{name} must be a sequence of integers, got {dtype} of shape {shape}")
    indices = indices.to(torch.int64, copy=True)  # the caller's memory may change later
    if indices.min() < 0:
        raise ValueError(f"{name} must be integers >= 0, got {int(indices.min())}")
    return indices


def _equal(n: int, m: int) -> list[int]:
    return [n // m + (i < n % m) for i in range(m)]


def _counts(sizes: Sequence[float], n: int, m: int) -> list[int]:
    if len(sizes) != m:
        raise ValueError(f"sizes must hold one number per part, {m}, got {len(sizes)}")
    edges = list(accumulate(sizes, initial=0))
    if all(hasattr(size, "__index__") for size in sizes):
        if edges[-1] != n:
            raise ValueError(f"sizes as counts must add up to {n}, got {edges[-1]}")
    else:
        if not math.isclose(edges[-1], 1.0, abs_tol=1e-6):
            raise ValueError(f"sizes as fractions must add up to 1, got {edges[-1]}")
        # Rounding the edges instead of the sizes makes the parts cover D by construction.
        edges = [round(n * edge / edges[-1]) for edge in edges]
    counts = [int(stop - start) for start, stop in pairwise(edges)]
    if min(counts) < 1:
        raise ValueError(f"sizes must leave no part empty, got {sizes}, that is {counts} samples")
    return counts


def _integer(name: str, value: Any, low: int, high: float = math.inf, why: str = "") -> int:
    """Return `value` as an int if it is one in [low, high]; `why` says what `high` is."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_integer or operator.index(value) < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
    if operator.index(value) > high:
        raise ValueError(f"{name} must be at most {high} ({why}), got {value!r}")
    return operator.index(value)
