"""A small problem whose batches differ, and the single-process run that every other must equal."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from torchpisa import NSISA, PISA, SISA
from torchpisa.optim.param_groups import is_matrix
from torchpisa.preconditioners import SecondMoment, Spectral, SpectralConsensus

Weights = list[Tensor]


def spectral(
    params: Any,
    *,
    sisa_sigma: Any,
    sisa_rho: Any,
    local: bool = False,
    aspect_scaling: bool = False,
    eta: float = float("inf"),
    **more: Any,
) -> PISA:
    """PISA with a spectral rule for matrices and SISA's for the rest."""
    params = list(params)
    rule = Spectral(eta, aspect_scaling=aspect_scaling)
    rest = {"preconditioner": SecondMoment(), "sigma": sisa_sigma, "rho": sisa_rho}
    matrices = {"preconditioner": rule if local else SpectralConsensus(0.95, rule)}
    groups = [
        {"params": [p for p in params if is_matrix(p)], **matrices},
        {"params": [p for p in params if not is_matrix(p)], **rest},
    ]
    return PISA(groups, **more)


# Everything is different for every node, so that nothing can be mixed up unnoticed.
NODES = range(4)
SIGMA = {
    SISA: [3.0, 2.5, 4.0, 3.5],
    NSISA: [80.0, 90.0, 70.0, 85.0],
    spectral: [3.0, 2.5, 4.0, 3.5],
}
RHO = {
    SISA: [20.0, 30.0, 15.0, 25.0],
    NSISA: [100.0, 80.0, 90.0, 110.0],
    spectral: [2.0, 3.0, 1.5, 2.5],
}
GAMMA = [0.999, 0.99, 1.0, 0.995]
SIZE = [1, 3, 2, 5]
COMMON = {"weight_decay": 0.01, "consensus_decay": 0.02}


def settings(make: Any, nodes: list[int]) -> dict[str, Any]:
    """Return the arguments of the optimizer of a process that holds these nodes."""

    def own(values: list[float]) -> list[float]:
        return [values[node] for node in nodes]

    more = {"sisa_sigma": own(SIGMA[SISA]), "sisa_rho": own(RHO[SISA])} if make is not SISA else {}
    return {
        "sigma": own(SIGMA[make]),
        "rho": own(RHO[make]),
        "gamma": own(GAMMA),
        "weights": own(SIZE),
        "batches": len(nodes),
        **COMMON,
        **more,
    }


def network(dtype: torch.dtype = torch.float64, seed: int = 1) -> nn.Sequential:
    # Drawn apart from the global generator; sizes that no number of shards divides.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)
        ).to(dtype)


def batch(node: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + node)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64) + node
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64) * (node + 1)
    return x.to(dtype), y.to(dtype)


def backward(model: nn.Module, node: int, step: int, dtype: torch.dtype, scale: float = 1) -> float:
    x, y = batch(node, step, dtype)
    loss = F.mse_loss(model(x), y)
    (scale * loss).backward()
    return float(loss.detach())


def alone(
    make: Any, nodes: int, steps: int, dtype: torch.dtype = torch.float64, **more: Any
) -> Weights:
    """One process with a batch per node."""
    model = network(dtype)
    opt = make(model.parameters(), **{**settings(make, list(range(nodes))), **more})
    for step in range(steps):
        for node in range(nodes):
            opt.zero_grad()
            backward(model, node, step, dtype)
            opt.step()
    return weights(model)


def here(per_rank: int = 1) -> list[int]:
    """The nodes of this rank."""
    first = distributed.get_rank() * per_rank
    return list(range(first, first + per_rank))


def together(
    make: Any, nodes: list[int], process_group: Any = None, **more: Any
) -> Callable[[Iterator[Tensor]], Any]:
    """Makes the optimizer of a process that holds `nodes`."""
    group = distributed.group.WORLD if process_group is None else process_group
    return lambda params: make(params, process_group=group, **{**settings(make, nodes), **more})


def weights(model: nn.Module) -> Weights:
    return [param.detach().clone() for param in model.parameters()]


def difference(results: list[Weights], expected: Weights) -> float:
    """Largest relative difference of any rank's weights."""
    return max(
        float((own - other).abs().max() / other.abs().max())
        for result in results
        for own, other in zip(result, expected, strict=True)
    )


def identical(results: list[Weights]) -> bool:
    return all(
        torch.equal(own, first)
        for result in results
        for own, first in zip(result, results[0], strict=True)
    )
