r"""The numbers of one round, from samples of the weights and duals before and after it.

What happened in a round shows in the duals: \(\pi_i\) changes by \(\delta_i = \sigma_i d_i\), and
\(w_i = w + d_i\). The relative learning rate divides sigma, so that what the paper calls
\(\sigma_i\) is sigma / lr here.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpisa.diagnostics.sample import Layout, Section
from torchpisa.distributed import dtensor
from torchpisa.distributed.process_group import Ranks, on_device
from torchpisa.kernels import foreach
from torchpisa.kernels.job import TINY, real
from torchpisa.optim import report
from torchpisa.optim.pisa import PISA
from torchpisa.optim.round import Part
from torchpisa.preconditioners import NewtonSchulz, Spectral, SpectralConsensus
from torchpisa.state_keys import state_key

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Snapshot", "measure", "others", "take"]

# Values of which medians are taken, of all processes together; and of each at least.
_MEDIAN_OF, _MEDIAN_OF_EACH = 2**12, 2**6


class Sample(NamedTuple):
    """Of a section: weights by coordinate, duals by batch and coordinate, steps by batch."""

    w: Tensor
    duals: Tensor
    steps: Tensor


class Snapshot(NamedTuple):
    """How things stand between two rounds.

    Attributes:
        iteration: rounds done.
        life: the optimizer's number, a new one after every load.
        layout: what the samples are of.
        samples: by section.
    """

    iteration: int
    life: int
    layout: Layout
    samples: list[Sample]


class _Numbers(NamedTuple):
    """sigma and rho by batch and parameter group, lr by group, alpha by batch."""

    sigma: Tensor
    rho: Tensor
    lr: Tensor
    weights: Tensor


class _Found(NamedTuple):
    """What a section contributes: sums, and first steps and momenta with their weights."""

    sums: Tensor
    values: Tensor
    weights: Tensor


def others(optimizer: PISA) -> list["ProcessGroup"]:
    """With whom sums are taken: the other ranks, then those who hold other shards."""
    nodes = [optimizer.peers.group] if isinstance(optimizer.peers, Ranks) else []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [*nodes, *dtensor.groups(params)]


def take(optimizer: PISA, layout: Layout) -> Snapshot:
    """Copy the samples as they are now."""
    samples = [_sample(optimizer, section) for section in layout.sections]
    return Snapshot(optimizer.iteration, optimizer.life, layout, samples)


def _sample(optimizer: PISA, section: Section) -> Sample:
    scale, slots = section.scale, range(optimizer.batches)
    steps = [tensor for slot in slots for tensor in _state(optimizer, section, "step", slot)]
    if any(step.device != steps[0].device for step in steps):
        steps = [step.to(scale.device, non_blocking=True) for step in steps]
    counted = torch.stack(steps).to(scale.device, scale.dtype, non_blocking=True)
    return Sample(
        w=section.gather([section.params])[0],
        duals=_gathered(optimizer, section, "dual"),
        steps=counted.view(len(slots), len(section.params)),
    )


def _state(optimizer: PISA, section: Section, name: str, slot: int) -> list[Tensor]:
    key = state_key(name, slot)
    return [optimizer.state[param][key] for param in section.params]


def _gathered(optimizer: PISA, section: Section, name: str) -> Tensor:
    """Samples of one kind of state, by batch."""
    slots = range(optimizer.batches)
    return section.gather([_state(optimizer, section, name, slot) for slot in slots])


def measure(optimizer: PISA, old: Snapshot, new: Snapshot) -> Tensor:
    """What `row` makes a row of, on the device, without waiting for it. All processes join."""
    layout = new.layout
    numbers = [_numbers(optimizer, section) for section in layout.sections]
    pairs = zip(numbers, new.samples, strict=True)
    means = [(own.weights * sample.duals).sum(0) for own, sample in pairs]
    totals = (numbers[0].weights * numbers[0].sigma).sum(0)
    if isinstance(optimizer.peers, Ranks):
        totals, *means = _summed([totals, *means], optimizer.peers.group, layout.home)
    parts = zip(layout.sections, numbers, old.samples, new.samples, means, strict=True)
    found = [_found(optimizer, *part) for part in parts]
    home = layout.home
    sums = torch.stack([own.sums.to(home) for own in found]).sum(0)
    steps = torch.stack([sample.steps.amax(1).to(home) for sample in new.samples]).amax(0)
    absent = (new.iteration - steps).clamp(min=0).sum()
    # With a weightless one, because there may be no others.
    values = torch.cat([*(own.values.to(home) for own in found), sums.new_zeros(2, 1)], dim=1)
    weights = torch.cat([*(own.weights.to(home) for own in found), sums.new_zeros(1)])
    lowest = torch.where(weights > 0, values, math.inf).amin(1)
    highest = torch.where(weights > 0, values, -math.inf).amax(1)
    own = torch.cat([sums, absent[None], lowest, highest])
    everyone, values, weights = _together(own, values, weights, others(optimizer))
    sums, lowest, highest = torch.split(everyone, [len(sums) + 1, 2, 2], dim=1)
    medians = _medians(values, weights)
    lrs = numbers[0].lr.to(home)
    return torch.cat([sums.sum(0), lowest.amin(0), medians, highest.amax(0), totals.to(home), lrs])


def _numbers(optimizer: PISA, section: Section) -> _Numbers:
    parts, m = optimizer.parts(), optimizer.batches
    sigmas = [sigma for part in parts for sigma in _mean_sigmas(optimizer, part)]
    rhos = [rho for part in parts for rho in part.rhos]
    lrs = [part.lr for part in parts]
    values = [*sigmas, *rhos, *lrs, *optimizer.param_groups[0]["weights"]]
    device, dtype = section.scale.device, section.scale.dtype
    n = len(parts)
    numbers = on_device(values, device, dtype)
    sigma, rho, lr, weights = torch.split(numbers, [n * m, n * m, n, m])
    return _Numbers(sigma.view(n, m).t(), rho.view(n, m).t(), lr, weights[:, None])


def _mean_sigmas(optimizer: PISA, part: Part) -> list[float | Tensor]:
    """Return sigma of a part by batch; where it follows gradients, the mean over its elements."""
    if not part.follows:
        return part.sigmas
    params = [param for param in part.params if optimizer.state.get(param)]
    elements = max(1, sum(param.numel() for param in params))
    means: list[float | Tensor] = []
    for slot in range(optimizer.batches):
        own = [
            param.numel() / elements * optimizer.state[param][state_key("sigma", slot)]
            for param in params
        ]
        means.append(sum(own, torch.zeros(())) if own else 1.0)
    return means


def _summed(tensors: list[Tensor], group: "ProcessGroup", home: torch.device) -> list[Tensor]:
    """Each of some vectors, added up over the ranks of `group`, in one go."""
    flat = torch.cat([tensor.to(home) for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    pieces = torch.split(dtensor.summed(flat, [group]), sizes)
    return [piece.to(own.device) for piece, own in zip(pieces, tensors, strict=True)]


def _found(
    optimizer: PISA,
    section: Section,
    numbers: _Numbers,
    old: Sample,
    new: Sample,
    mean: Tensor,
) -> _Found:
    group_of, decay = section.part_of, section.dual_decay
    sigma, rho, lr = numbers.sigma[:, group_of], numbers.rho[:, group_of], numbers.lr[group_of]
    if section.follows:
        slots = range(optimizer.batches)
        own = [torch.stack(_state(optimizer, section, "sigma", slot)) for slot in slots]
        sigma = torch.stack(own).to(sigma).clamp(min=TINY)[:, section.tensor_of]
    # An absent batch keeps its dual, which dual_decay has not touched.
    stepped = (new.steps > old.steps)[:, section.tensor_of]
    delta = torch.where(stepped, new.duals / (decay or math.nan) - old.duals, 0.0)
    moved = torch.where(lr > 0, (new.w - old.w) / lr, 0.0)
    weights = numbers.weights * section.scale
    sums = [
        (weights * (lr * delta / sigma).square()).sum(),
        (section.scale * old.w.square()).sum(),
        (weights * (sigma * moved).square()).sum(),
        (weights * new.duals.square()).sum(),
        (weights * (new.duals - mean).square()).sum(),
    ]
    diagonal = _diagonal(optimizer, section, sigma, rho, delta, stepped, new)
    if diagonal is None:
        nothing = section.scale.new_zeros(2, 0)
        return _Found(F.pad(torch.stack(sums), (0, 2)), nothing, nothing[0])
    rq, known = diagonal
    picture = report.picture(sigma, rq, lr)
    counted = torch.where(known, section.scale, 0.0)
    sums += [(counted * (sigma > rq)).sum(), counted.sum()]
    values = torch.stack([picture.first_step.flatten(), picture.momentum.flatten()])
    return _Found(torch.stack(sums), values, counted.flatten())


def _diagonal(
    optimizer: PISA,
    section: Section,
    sigma: Tensor,
    rho: Tensor,
    delta: Tensor,
    stepped: Tensor,
    new: Sample,
) -> tuple[Tensor, Tensor] | None:
    """rho q, and where it is known; None if Q has no diagonal."""
    own = section.preconditioner
    if type(own) is NewtonSchulz:
        # d = -s/(sigma + rho |s|) with q = |s|, so what rho q is of the sum is rho |d|, and nothing
        # has to be orthogonalised again.
        if not section.dual_decay:
            return None
        share = (rho * delta.abs() / sigma).clamp(max=1 - torch.finfo(delta.dtype).eps)
        return sigma * share / (1 - share), stepped
    if type(own) in (Spectral, SpectralConsensus):  # they turn coordinates into one another
        return None
    steps = new.steps[:, section.tensor_of]
    if foreach.knows(own):
        names = own.init(new.duals[:0])
        state = {name: _gathered(optimizer, section, name) for name in names}
        q = own.diagonal(new.duals, state, _one(new.steps) or steps)
    else:
        q = _asked(optimizer, section)
    known = steps > 0
    return None if q is None else (torch.where(known, rho * q, 0.0), known)


def _one(steps: Tensor) -> float | None:
    """The number that all counters show, if that can be seen without waiting: most often it is."""
    if steps.device.type != "cpu":
        return None
    lowest, highest = steps.aminmax()
    return float(lowest) if lowest == highest else None


def _asked(optimizer: PISA, section: Section) -> Tensor | None:
    """q of a preconditioner of which nothing is known: it is asked for all of every tensor."""
    rows = []
    for slot in range(optimizer.batches):
        row = []
        for param in section.params:
            state = optimizer.state[param]
            dual = real(dtensor.local(state[state_key("dual", slot)]))
            step = state[state_key("step", slot)]
            if step.device.type == "cpu" and not step:
                row.append(torch.zeros_like(dual))
                continue
            q = report.diagonal(section.preconditioner, state, slot)
            if q is None:
                return None
            if q.shape != dual.shape:
                raise ValueError(
                    f"diagonal must have the shape {tuple(dual.shape)} of the dual, got "
                    f"{tuple(q.shape)} from {type(section.preconditioner).__name__}"
                )
            row.append(q)
        rows.append(row)
    return section.gather(rows)


def _together(
    own: Tensor, values: Tensor, weights: Tensor, over: Sequence["ProcessGroup"]
) -> tuple[Tensor, Tensor, Tensor]:
    """`own` of every process, one per row, and as many values and weights as medians need."""
    processes = math.prod(group.size() for group in over)
    limit = max(_MEDIAN_OF_EACH, _MEDIAN_OF // processes)
    every = -(-weights.numel() // limit)
    some = torch.cat([values, every * weights[None]])[:, ::every]
    if not over:
        return own[None], some[:2], some[2]
    from torch import distributed

    some = F.pad(some, (0, limit - some.size(1)))
    packed = torch.cat([own, some.flatten()])[None]
    for group in over:
        received = packed.new_empty(group.size() * packed.size(0), packed.size(1))
        distributed.all_gather_into_tensor(received, packed, group=group)
        packed = received
    everyone, all_of_it = torch.split(packed, [own.numel(), some.numel()], dim=1)
    first, second, third = all_of_it.view(-1, 3, limit).unbind(1)
    return everyone, torch.stack([first.flatten(), second.flatten()]), third.flatten()


def _medians(values: Tensor, weights: Tensor) -> Tensor:
    """Of each row the value that half of the weight does not exceed."""
    ordered, order = values.sort(dim=1)
    reached = weights[order].cumsum(1)
    place = torch.searchsorted(reached, reached[:, -1:] / 2)
    return ordered.gather(1, place.clamp(max=weights.numel() - 1)).squeeze(1)
