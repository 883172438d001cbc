r"""Partitions of samples over the clients of federated learning.

Every function here divides all samples among `clients` and returns `torchpisa.data.Parts`: the
indices of each client's samples, and with `Parts.weights` the shares \(\alpha_i\). The kinds of
skew and their names are those of NIID-Bench (Li et al., Federated Learning on Non-IID Data Silos,
2022):

- none: `iid`;
- labels: `by_label`, a fixed number of labels per client, `dirichlet`, unequal shares of every
  label, and `by_mixture`, a mixture of labels per client, for thousands of clients;
- amounts: `by_quantity`, unequal sizes of the same mixture;
- features: any of these, and `add_noise` with the `noise_levels` of the clients;
- natural: `by_owner`, the split that the data comes with.

The same seed gives the same parts.
"""

import math
import random
import reprlib
from collections.abc import Hashable, Iterable, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchpisa.checks import check_count, check_range
from torchpisa.data import Parts, hashed, length, permutation, split

__all__ = [
    "add_noise",
    "by_label",
    "by_mixture",
    "by_owner",
    "by_quantity",
    "dirichlet",
    "iid",
    "label_counts",
    "noise_levels",
]

# Dirichlet shares that are drawn before giving up, which takes some seconds. A small alpha with a
# large `smallest` may well take hundreds of draws, so stopping early would refuse what is possible.
MAX_SHARES = 1_000_000


def iid(data: Dataset[Any] | Sized | int, clients: int, *, seed: int = 0) -> Parts:
    """Deal all samples out at random in equal numbers, as `torchpisa.data.split` does.

    Args:
        data: anything with a length, or that length.
        clients: the number of clients.
        seed: seed of the assignment.

    Examples:
        >>> iid(10, clients=3)
        Parts(sizes=(4, 3, 3))
    """
    _check_clients(clients, length(data), 1)
    return split(data, clients, seed=seed)


def by_label(
    labels: Tensor | Sequence[int], clients: int, labels_per_client: int, *, seed: int = 0
) -> Parts:
    r"""Give every client samples of exactly \(s\) labels.

    Client \(i\) holds label \(i\) mod \(C\) of the \(C\) labels in ascending order, and \(s - 1\)
    others at random. Of \(m\) clients, \(\lfloor ms / C \rfloor\) or \(\lceil ms / C \rceil\) hold
    any one label (NIID-Bench draws the others freely, so there a label may have many holders or
    few). The holders of a label share its samples equally, give or take one.

    Args:
        labels: one integer per sample, as a tensor, list or array. Their values are arbitrary.
        clients: \(m\).
        labels_per_client: \(s\), at most \(C\), and with \(ms \ge C\), so that no label is lost.
        seed: decides which other labels a client holds, and which samples.

    Raises:
        TypeError: `labels` are not integers.
        ValueError: an argument is out of its range, or a label has fewer samples than holders.

    Examples:
        >>> income = [0, 1, 1, 0, 0, 0, 1, 0]
        >>> parts = by_label(income, clients=4, labels_per_client=1)
        >>> label_counts(parts, income)
        tensor([[2, 0],
                [0, 1],
                [3, 0],
                [0, 2]])
    """
    classes, kinds, counts = by_class(labels)
    _check_clients(clients, len(kinds), 1)
    check_count("seed", seed, 0)
    check_count("labels_per_client", labels_per_client)
    C, s = len(counts), labels_per_client
    if s > C:
        raise ValueError(f"labels_per_client must be at most {C} (the number of labels), got {s}")
    if clients * s < C:
        raise ValueError(
            f"labels_per_client must be at least {math.ceil(C / clients)}, so that {clients} "
            f"clients hold all {C} labels, got {s}"
        )
    holders = _holder_counts(counts, clients, s, seed)
    for label, count, needed in zip(classes.tolist(), counts, holders, strict=True):
        if count < needed:
            raise ValueError(
                f"labels must have a sample of each label for every client that holds it, got "
                f"{count} of label {label} for {needed} clients: lower clients or labels_per_client"
            )
    held = _deal(holders, clients, s, seed)
    shares: list[list[Tensor]] = [[] for _ in range(clients)]
    for j, samples in enumerate(_samples(kinds, counts, "by_label", seed)):
        owners = [i for i in range(clients) if j in held[i]]
        # Shuffled, so that the one sample more does not always go to the first clients.
        owners = [owners[k] for k in permutation(len(owners), "owners", seed, j).tolist()]
        for i, share in zip(owners, samples.tensor_split(len(owners)), strict=True):
            shares[i].append(share)
    return _parts(shares)


def dirichlet(
    labels: Tensor | Sequence[int],
    clients: int,
    alpha: float,
    *,
    seed: int = 0,
    smallest: int = 1,
) -> Parts:
    r"""Divide each label among all clients in shares drawn from \(\mathrm{Dir}(\alpha)\).

    A small \(\alpha\) gives most of a label to one client, a large one is nearly `iid`. The shares
    of the labels are independent, so the sizes of the clients differ as well. (In NIID-Bench a
    client gets nothing more once it has an equal share; here there is no such limit.)

    Args:
        labels: one integer per sample, as a tensor, list or array. Their values are arbitrary.
        clients: the number of clients.
        alpha: \(\alpha > 0\); 0.1 and 0.5 are common.
        seed: decides the shares, and which samples.
        smallest: the least number of samples of a client. The shares of all labels are drawn again
            until every client has it, a million shares at most.

    Raises:
        TypeError: `labels` are not integers.
        ValueError: an argument is out of its range, or no draw gave every client enough.

    Examples:
        >>> labels = [0] * 50 + [1] * 50
        >>> label_counts(dirichlet(labels, clients=3, alpha=1000.0), labels)
        tensor([[17, 17],
                [16, 16],
                [17, 17]])
    """
    _, kinds, counts = by_class(labels)
    cuts = _draw(counts, clients, alpha, seed, smallest)
    shares: list[list[Tensor]] = [[] for _ in range(clients)]
    for samples, sizes in zip(_samples(kinds, counts, "dirichlet", seed), cuts, strict=True):
        for i, share in enumerate(torch.split(samples, sizes)):
            shares[i].append(share)
    return _parts(shares)


def by_mixture(
    labels: Tensor | Sequence[int],
    clients: int,
    alpha: float,
    *,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
) -> Parts:
    r"""Draw each client's mixture of labels from a Dirichlet distribution, and samples by it.

    The form of Hsu et al. (Measuring the Effects of Non-Identical Data Distribution, 2019): with
    \(p\) the shares of the labels in all data, a client's mixture is drawn from
    \(\mathrm{Dir}(\alpha p)\), and its samples label by label from the mixture, without
    replacement. When a label runs out, the others take its share. Sizes are given, so this works
    for thousands of clients with few samples, many of which `dirichlet` leaves without any.

    Args:
        labels: one integer per sample, as a tensor, list or array. Their values are arbitrary.
        clients: the number of clients.
        alpha: \(\alpha > 0\); the smaller, the fewer labels a client has.
        sizes: samples of each client, at most all in sum; by default equal, give or take one.
        seed: decides the mixtures, and which samples.

    Raises:
        TypeError: `labels` are not integers.
        ValueError: an argument is out of its range.

    Examples:
        >>> labels = [0] * 50 + [1] * 50
        >>> label_counts(by_mixture(labels, clients=4, alpha=0.1), labels)
        tensor([[ 1, 24],
                [ 0, 25],
                [24,  1],
                [25,  0]])
    """
    _, kinds, counts = by_class(labels)
    n = len(kinds)
    _check_clients(clients, n, 1)
    check_range("alpha", alpha, 0, low_open=True, high_open=True)
    check_count("seed", seed, 0)
    if sizes is None:
        sizes = [n // clients + (i < n % clients) for i in range(clients)]
    sizes = _checked_sizes(sizes, clients, n)
    source = random.Random(hashed("mixtures", seed))
    stocks = [samples.tolist() for samples in _samples(kinds, counts, "by_mixture", seed)]
    shares: list[list[Tensor]] = [[] for _ in range(clients)]
    # In a shuffled order: the last ones get what is left.
    for i in permutation(clients, "by_mixture", seed).tolist():
        mixture = _shares([alpha * count / n for count in counts], source)
        shares[i] = [torch.tensor(_take(stocks, mixture, sizes[i], source), device="cpu")]
    return _parts(shares)


def by_owner(owners: Iterable[Hashable], *, smallest: int = 1) -> Parts:
    """Give every owner its own samples: the split that the data comes with.

    Owners are writers of digits, authors of texts, hospitals, phones. Clients are in the order in
    which they first appear.

    Args:
        owners: the owner of each sample, anything that can be compared and hashed.
        smallest: owners with fewer samples are left out.

    Raises:
        TypeError: `owners` are not one owner per sample, or one cannot be hashed.
        ValueError: there are no owners, or none has so many.

    Examples:
        >>> by_owner(["ann", "bob", "ann", "cy", "ann", "bob"], smallest=2).indices
        (tensor([0, 2, 4]), tensor([1, 5]))
    """
    check_count("smallest", smallest)
    samples: dict[Hashable, list[int]] = {}
    try:
        for index, owner in enumerate(owners):
            if isinstance(owner, Tensor):  # two tensors are never the same key
                owner = owner.item()
            samples.setdefault(owner, []).append(index)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"owners must be one owner per sample that can be hashed, got {reprlib.repr(owners)}: "
            f"{error}"
        ) from None
    if not samples:
        raise ValueError("owners must hold the owner of at least one sample, got none")
    parts = [own for own in samples.values() if len(own) >= smallest]
    if not parts:
        most = max(map(len, samples.values()))
        raise ValueError(f"smallest must be at most {most} (the most of one owner), got {smallest}")
    return Parts.from_indices(parts)


def by_quantity(
    data: Dataset[Any] | Sized | int,
    clients: int,
    alpha: float,
    *,
    seed: int = 0,
    smallest: int = 1,
) -> Parts:
    r"""Deal samples out at random, in numbers that follow \(\mathrm{Dir}(\alpha)\).

    Args:
        data: anything with a length, or that length.
        clients: the number of clients.
        alpha: \(\alpha > 0\); the smaller, the more unequal the sizes.
        seed: decides the sizes, and which samples.
        smallest: the least number of samples of a client. The sizes are drawn again until every
            client has it, a million sizes at most.

    Raises:
        ValueError: an argument is out of its range, or no draw gave every client enough.

    Examples:
        >>> parts = by_quantity(1000, clients=4, alpha=0.5, smallest=10)
        >>> sum(parts.sizes), min(parts.sizes) >= 10
        (1000, True)
    """
    n = length(data)
    (sizes,) = _draw([n], clients, alpha, seed, smallest)
    return split(n, clients, sizes=sizes, seed=seed)


def label_counts(parts: Parts, labels: Tensor | Sequence[int]) -> Tensor:
    """Count the samples of each label that each client holds.

    Args:
        parts: the samples of each client.
        labels: one integer per sample.

    Returns:
        Integers of shape (clients, labels), the labels in ascending order.

    Raises:
        TypeError: `labels` are not integers.
        ValueError: `parts` has an index beyond `labels`.

    Examples:
        >>> label_counts(Parts.from_indices([[0, 1, 2], [3]]), [7, 7, 9, 9])
        tensor([[2, 1],
                [0, 1]])
    """
    classes, kinds, _ = by_class(labels)
    last = max(int(part.max()) for part in parts.indices)
    if last >= len(kinds):
        raise ValueError(
            f"labels must hold one label per sample, up to index {last} of parts, "
            f"got {len(kinds)} labels"
        )
    return torch.stack([kinds[part].bincount(minlength=len(classes)) for part in parts.indices])


def noise_levels(clients: int, largest: float) -> tuple[float, ...]:
    r"""Return the variances \(\sigma i / m\) of NIID-Bench's feature skew, \(i = 1, \ldots, m\).

    This is the formula of its paper. Its code has \(\sigma (i - 1) / (m - 1)\) as standard
    deviations.

    Args:
        clients: \(m\).
        largest: \(\sigma\), the variance of the last client's noise.

    Raises:
        ValueError: an argument is out of its range.

    Examples:
        >>> noise_levels(4, largest=1.0)
        (0.25, 0.5, 0.75, 1.0)
    """
    check_count("clients", clients)
    check_range("largest", largest, 0, high_open=True)
    return tuple(largest * i / clients for i in range(1, clients + 1))


def add_noise(inputs: Tensor, level: float, *, client: int = 0, seed: int = 0) -> Tensor:
    """Return `inputs` plus Gaussian noise of mean 0 and variance `level`, as a new tensor.

    Args:
        inputs: floating-point features of one client's samples, of any shape.
        level: the variance, of `noise_levels` for instance.
        client: the number of the client, each of which has its own noise.
        seed: decides the noise, together with `client` and the shape of `inputs`.

    Raises:
        TypeError: `inputs` is not a floating-point tensor.
        ValueError: an argument is out of its range.

    Examples:
        >>> noisy = add_noise(torch.zeros(1000, 50), 0.25, client=3)
        >>> round(float(noisy.std()), 2)
        0.5
    """
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        got = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"inputs must be a floating-point tensor, got {got}")
    check_range("level", level, 0, high_open=True)
    check_count("client", client, 0)
    check_count("seed", seed, 0)
    # Drawn on the CPU, so that the noise is the same whatever device the inputs are on.
    generator = torch.Generator().manual_seed(hashed("noise", seed, client))
    noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype, device="cpu")
    return inputs + math.sqrt(level) * noise.to(inputs.device)


def by_class(labels: Tensor | Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Return the distinct labels, ascending; each sample's position among them; their counts."""
    try:
        values = torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"labels must be a sequence of integers, got {reprlib.repr(labels)}"
        ) from None
    if values.numel() == 0:
        raise ValueError("labels must hold at least one label, got none")
    dtype, shape = values.dtype, tuple(values.shape)
    if values.ndim != 1 or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"labels must be a sequence of integers, got {dtype} of shape {shape}")
    classes, kinds, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return classes, kinds, counts.tolist()


def _check_clients(clients: int, n: int, smallest: int) -> None:
    check_count("clients", clients)
    check_count("smallest", smallest)
    if clients * smallest > n:
        legal = f"at most {n // smallest} ({n} samples, at least {smallest} per client)"
        raise ValueError(f"clients must be {legal}, got {clients}")


def _checked_sizes(sizes: Sequence[int], clients: int, n: int) -> list[int]:
    if hasattr(sizes, "tolist"):
        sizes = sizes.tolist()
    if not isinstance(sizes, Sequence):
        raise TypeError(f"sizes must be one number per client, got {sizes!r}")
    if len(sizes) != clients:
        raise ValueError(
            f"sizes must hold a number for each of {clients} clients, got {len(sizes)}"
        )
    for i, size in enumerate(sizes):
        check_count(f"sizes[{i}]", size)
    if sum(sizes) > n:
        raise ValueError(f"sizes must add up to at most {n} (the samples), got {sum(sizes)}")
    return list(sizes)


def _take(
    stocks: list[list[int]], mixture: list[float], size: int, source: random.Random
) -> list[int]:
    """Take samples out of the stocks of the labels, each of a label drawn from the mixture."""
    taken = []
    weights = [share if stock else 0.0 for share, stock in zip(mixture, stocks, strict=True)]
    for _ in range(size):
        if not any(weights):  # all labels of the mixture have run out
            weights = [float(len(stock)) for stock in stocks]
        (label,) = source.choices(range(len(stocks)), weights)
        taken.append(stocks[label].pop())
        if not stocks[label]:
            weights[label] = 0.0
    return taken


def _samples(kinds: Tensor, counts: list[int], use: str, seed: int) -> list[Tensor]:
    """Return the samples of each label, shuffled."""
    grouped = torch.split(kinds.argsort(stable=True), counts)
    return [group[permutation(len(group), use, seed, j)] for j, group in enumerate(grouped)]


def _parts(shares: list[list[Tensor]]) -> Parts:
    # Sorted, so in the order of the data: label after label would be a poor order to train in.
    return Parts(tuple(torch.cat(share).sort().values for share in shares))


def _holder_counts(counts: list[int], clients: int, s: int, seed: int) -> list[int]:
    """Return the number of clients that hold each label: equal numbers, give or take one."""
    base, more = divmod(clients * s, len(counts))
    order = list(range(len(counts)))
    if s > 1:
        order = permutation(len(counts), "holders", seed).tolist()
        # Labels with enough samples come first, and so get the additional holders.
        order.sort(key=lambda j: counts[j] <= base)
    return [base + (j in order[:more]) for j in range(len(counts))]


def _deal(holders: list[int], clients: int, s: int, seed: int) -> list[list[int]]:
    """Return the labels of each client: s different ones, with `holders[j]` holders of the j-th."""
    C = len(holders)
    held = [[i % C] for i in range(clients)]
    room = [holders[j] - len(range(j, clients, C)) for j in range(C)]
    shuffle = random.Random(hashed("deal", seed)).shuffle

    def give_label(i: int, tried: set[int]) -> bool:
        """Give client i one label more; if none has room, make another client swap one of its."""
        order = [j for j in range(C) if j not in held[i] and j not in tried]
        shuffle(order)
        for j in order:
            if room[j] > 0:
                room[j] -= 1
                held[i].append(j)
                return True
        for j in order:
            tried.add(j)
            for other in range(clients):
                if j in held[other][1:] and give_label(other, tried):
                    held[other].remove(j)
                    held[i].append(j)
                    return True
        return False

    order_of_clients = list(range(clients))
    for _ in range(s - 1):
        shuffle(order_of_clients)
        for i in order_of_clients:
            received = give_label(i, set())
            assert received  # an augmenting path exists as long as there is room
    return held


def _draw(
    counts: list[int], clients: int, alpha: float, seed: int, smallest: int
) -> list[list[int]]:
    """Cut each of `counts` into one number per client, in shares from Dir(alpha)."""
    _check_clients(clients, sum(counts), smallest)
    check_range("alpha", alpha, 0, low_open=True, high_open=True)
    check_count("seed", seed, 0)
    source = random.Random(hashed("shares", seed))
    draws = max(1, MAX_SHARES // (clients * len(counts)))
    for _ in range(draws):
        cuts = [_cut(n, _shares([alpha] * clients, source)) for n in counts]
        if min(map(sum, zip(*cuts, strict=True))) >= smallest:
            return cuts
    raise ValueError(
        f"alpha must be larger for {clients} clients of at least {smallest} samples, got {alpha}: "
        f"none of {draws} draws gave each that many (or lower clients or smallest)"
    )


def _shares(alphas: Sequence[float], source: random.Random) -> list[float]:
    """Draw from Dir(alphas): gamma variates over their sum."""
    # Gamma(a) is Gamma(a + 1) U^(1/a); as logarithms, because for small a it underflows to 0.
    # 1 - random() is in (0, 1].
    logs = [
        math.log(source.gammavariate(alpha + 1, 1)) + math.log(1 - source.random()) / alpha
        for alpha in alphas
    ]
    top = max(logs)
    sizes = [math.exp(log - top) for log in logs]
    total = math.fsum(sizes)
    return [size / total for size in sizes]


def _cut(n: int, shares: list[float]) -> list[int]:
    # Rounding the edges instead of the sizes makes the cuts add up to n.
    edges = [round(n * min(edge, 1.0)) for edge in accumulate(shares, initial=0.0)]
    edges[-1] = n
    return [stop - start for start, stop in pairwise(edges)]
