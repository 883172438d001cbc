r"""Measure one round, from samples of the weights and duals before and after it.

The duals show the local steps: \(\pi_i\) changes by \(\delta_i = \sigma_i d_i\), and
\(w_i = w + d_i\). The relative learning rate divides sigma, so the paper's \(\sigma_i\) is
sigma / lr here.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchpisa.diagnostics.sampling import SampleLayout, SampleSection
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

__all__ = ["RoundSnapshot", "measure", "process_groups", "take_snapshot"]

# Number of values in a median: over all processes, and at least from each process.
_MEDIAN_OF, _MEDIAN_OF_EACH = 2**12, 2**6


class SectionSample(NamedTuple):
    """Samples of a section: weights by coordinate, duals also by batch, steps by batch."""

    w: Tensor
    duals: Tensor
    steps: Tensor


class RoundSnapshot(NamedTuple):
    """Samples of weights and duals between two rounds.

    Attributes:
        iteration: the number of rounds done.
        instance_id: the optimizer's number, which changes with every load.
        layout: the sampled coordinates.
        samples: the samples, by section.
    """

    iteration: int
    instance_id: int
    layout: SampleLayout
    samples: list[SectionSample]


class _Settings(NamedTuple):
    """sigma and rho by batch and parameter group, lr by group, alpha by batch."""

    sigma: Tensor
    rho: Tensor
    lr: Tensor
    weights: Tensor


class _SectionResult(NamedTuple):
    """Sums over a section, and its first steps and momenta with their weights."""

    sums: Tensor
    values: Tensor
    weights: Tensor


def process_groups(optimizer: PISA) -> list["ProcessGroup"]:
    """Return the groups to sum over: the ranks, then the holders of other shards."""
    nodes = [optimizer.peers.group] if isinstance(optimizer.peers, Ranks) else []
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [*nodes, *dtensor.mesh_groups(params)]


def take_snapshot(optimizer: PISA, layout: SampleLayout) -> RoundSnapshot:
    """Return copies of the samples."""
    samples = [_take_sample(optimizer, section) for section in layout.sections]
    return RoundSnapshot(optimizer.iteration, optimizer.instance_id, layout, samples)


def _take_sample(optimizer: PISA, section: SampleSection) -> SectionSample:
    scale, slots = section.scale, range(optimizer.batches)
    steps = [tensor for slot in slots for tensor in _state(optimizer, section, "step", slot)]
    if any(step.device != steps[0].device for step in steps):
        steps = [step.to(scale.device, non_blocking=True) for step in steps]
    counted = torch.stack(steps).to(scale.device, scale.dtype, non_blocking=True)
    return SectionSample(
        w=section.gather([section.params])[0],
        duals=_state_samples(optimizer, section, "dual"),
        steps=counted.view(len(slots), len(section.params)),
    )


def _state(optimizer: PISA, section: SampleSection, name: str, slot: int) -> list[Tensor]:
    key = state_key(name, slot)
    return [optimizer.state[param][key] for param in section.params]


def _state_samples(optimizer: PISA, section: SampleSection, name: str) -> Tensor:
    """Return samples of one entry of the state, by batch."""
    slots = range(optimizer.batches)
    return section.gather([_state(optimizer, section, name, slot) for slot in slots])


def measure(optimizer: PISA, old: RoundSnapshot, new: RoundSnapshot) -> Tensor:
    """Return the numbers for `make_row`, on the device and without waiting. A collective."""
    layout = new.layout
    settings = [_settings(optimizer, section) for section in layout.sections]
    pairs = zip(settings, new.samples, strict=True)
    means = [(section.weights * sample.duals).sum(0) for section, sample in pairs]
    totals = (settings[0].weights * settings[0].sigma).sum(0)
    if isinstance(optimizer.peers, Ranks):
        totals, *means = _summed([totals, *means], optimizer.peers.group, layout.home)
    parts = zip(layout.sections, settings, old.samples, new.samples, means, strict=True)
    results = [_measure_section(optimizer, *part) for part in parts]
    home = layout.home
    sums = torch.stack([result.sums.to(home) for result in results]).sum(0)
    steps = torch.stack([sample.steps.amax(1).to(home) for sample in new.samples]).amax(0)
    absent = (new.iteration - steps).clamp(min=0).sum()
    # One value without weight is added, because there may be no others.
    values = torch.cat([*(result.values.to(home) for result in results), sums.new_zeros(2, 1)], 1)
    weights = torch.cat([*(result.weights.to(home) for result in results), sums.new_zeros(1)])
    lowest = torch.where(weights > 0, values, math.inf).amin(1)
    highest = torch.where(weights > 0, values, -math.inf).amax(1)
    packed = torch.cat([sums, absent[None], lowest, highest])
    all_sums, values, weights = _gather_from_all(packed, values, weights, process_groups(optimizer))
    sums, lowest, highest = torch.split(all_sums, [len(sums) + 1, 2, 2], dim=1)
    medians = _medians(values, weights)
    lrs = settings[0].lr.to(home)
    return torch.cat([sums.sum(0), lowest.amin(0), medians, highest.amax(0), totals.to(home), lrs])


def _settings(optimizer: PISA, section: SampleSection) -> _Settings:
    parts, m = optimizer.parts(), optimizer.batches
    sigmas = [sigma for part in parts for sigma in _mean_sigmas(optimizer, part)]
    rhos = [rho for part in parts for rho in part.rhos]
    lrs = [part.lr for part in parts]
    values = [*sigmas, *rhos, *lrs, *optimizer.param_groups[0]["weights"]]
    device, dtype = section.scale.device, section.scale.dtype
    n = len(parts)
    numbers = on_device(values, device, dtype)
    sigma, rho, lr, weights = torch.split(numbers, [n * m, n * m, n, m])
    return _Settings(sigma.view(n, m).t(), rho.view(n, m).t(), lr, weights[:, None])


def _mean_sigmas(optimizer: PISA, part: Part) -> list[float | Tensor]:
    """Return sigma of a part by batch; where it follows gradients, the mean over its elements."""
    if not part.sigma_follows:
        return part.sigmas
    params = [param for param in part.params if optimizer.state.get(param)]
    elements = max(1, sum(param.numel() for param in params))
    means: list[float | Tensor] = []
    for slot in range(optimizer.batches):
        weighted = [
            param.numel() / elements * optimizer.state[param][state_key("sigma", slot)]
            for param in params
        ]
        means.append(sum(weighted, torch.zeros(())) if weighted else 1.0)
    return means


def _summed(tensors: list[Tensor], group: "ProcessGroup", home: torch.device) -> list[Tensor]:
    """Return each vector, summed over the ranks of `group` in one collective."""
    flat = torch.cat([tensor.to(home) for tensor in tensors])
    sizes = [tensor.numel() for tensor in tensors]
    pieces = torch.split(dtensor.summed(flat, [group]), sizes)
    return [piece.to(tensor.device) for piece, tensor in zip(pieces, tensors, strict=True)]


def _measure_section(
    optimizer: PISA,
    section: SampleSection,
    settings: _Settings,
    old: SectionSample,
    new: SectionSample,
    mean: Tensor,
) -> _SectionResult:
    part_of, decay = section.part_of, section.dual_decay
    sigma, rho, lr = settings.sigma[:, part_of], settings.rho[:, part_of], settings.lr[part_of]
    if section.sigma_follows:
        slots = range(optimizer.batches)
        sigmas = [torch.stack(_state(optimizer, section, "sigma", slot)) for slot in slots]
        sigma = torch.stack(sigmas).to(sigma).clamp(min=TINY)[:, section.tensor_of]
    # The dual of an absent batch stays as it was, without dual_decay.
    stepped = (new.steps > old.steps)[:, section.tensor_of]
    delta = torch.where(stepped, new.duals / (decay or math.nan) - old.duals, 0.0)
    moved = torch.where(lr > 0, (new.w - old.w) / lr, 0.0)
    weights = settings.weights * section.scale
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
        return _SectionResult(F.pad(torch.stack(sums), (0, 2)), nothing, nothing[0])
    rq, known = diagonal
    picture = report.picture(sigma, rq, lr)
    counted = torch.where(known, section.scale, 0.0)
    sums += [(counted * (sigma > rq)).sum(), counted.sum()]
    values = torch.stack([picture.first_step.flatten(), picture.momentum.flatten()])
    return _SectionResult(torch.stack(sums), values, counted.flatten())


def _diagonal(
    optimizer: PISA,
    section: SampleSection,
    sigma: Tensor,
    rho: Tensor,
    delta: Tensor,
    stepped: Tensor,
    new: SectionSample,
) -> tuple[Tensor, Tensor] | None:
    """Return rho q and a mask of the known entries, or None if Q has no diagonal."""
    rule = section.preconditioner
    if type(rule) is NewtonSchulz:
        # d = -s/(sigma + rho |s|) with q = |s|. So rho q follows from rho |d|, without
        # orthogonalising again.
        if not section.dual_decay:
            return None
        share = (rho * delta.abs() / sigma).clamp(max=1 - torch.finfo(delta.dtype).eps)
        return sigma * share / (1 - share), stepped
    if type(rule) in (Spectral, SpectralConsensus):  # their Q mixes coordinates
        return None
    steps = new.steps[:, section.tensor_of]
    if foreach.knows(rule):
        names = rule.init(new.duals[:0])
        state = {name: _state_samples(optimizer, section, name) for name in names}
        q = rule.diagonal(new.duals, state, _common_step(new.steps) or steps)
    else:
        q = _diagonals_by_batch(optimizer, section)
    known = steps > 0
    return None if q is None else (torch.where(known, rho * q, 0.0), known)


def _common_step(steps: Tensor) -> float | None:
    """Return the common value of all counters if they are equal and on the CPU."""
    if steps.device.type != "cpu":
        return None
    lowest, highest = steps.aminmax()
    return float(lowest) if lowest == highest else None


def _diagonals_by_batch(optimizer: PISA, section: SampleSection) -> Tensor | None:
    """Return q of a user's preconditioner, computed for whole tensors."""
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


def _gather_from_all(
    sums: Tensor, values: Tensor, weights: Tensor, groups: Sequence["ProcessGroup"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gather `sums`, one row per process, and as many values and weights as medians need."""
    processes = math.prod(group.size() for group in groups)
    limit = max(_MEDIAN_OF_EACH, _MEDIAN_OF // processes)
    stride = -(-weights.numel() // limit)
    subset = torch.cat([values, stride * weights[None]])[:, ::stride]
    if not groups:
        return sums[None], subset[:2], subset[2]
    from torch import distributed

    subset = F.pad(subset, (0, limit - subset.size(1)))
    packed = torch.cat([sums, subset.flatten()])[None]
    for group in groups:
        received = packed.new_empty(group.size() * packed.size(0), packed.size(1))
        distributed.all_gather_into_tensor(received, packed, group=group)
        packed = received
    all_sums, all_subsets = torch.split(packed, [sums.numel(), subset.numel()], dim=1)
    first, second, third = all_subsets.view(-1, 3, limit).unbind(1)
    return all_sums, torch.stack([first.flatten(), second.flatten()]), third.flatten()


def _medians(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted median of each row."""
    ordered, order = values.sort(dim=1)
    cumulative = weights[order].cumsum(1)
    place = torch.searchsorted(cumulative, cumulative[:, -1:] / 2)
    return ordered.gather(1, place.clamp(max=weights.numel() - 1)).squeeze(1)
