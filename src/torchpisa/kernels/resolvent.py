"""Solve `Spectral` for many matrices, in batches of one shape and bounded memory.

The mathematics is in `algorithms/spectral.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchpisa.algorithms import spectral
from torchpisa.algorithms.pisa import Scalar
from torchpisa.kernels import newton_schulz
from torchpisa.kernels.newton_schulz import chunks
from torchpisa.preconditioners import Spectral

__all__ = ["averaged", "resolvents"]

# On a CPU batches save small matrices the cost of calls, and large ones nothing.
_CPU_CHUNK_BYTES = 4 * 2**20


def resolvents(rs: Sequence[Tensor], rule: Spectral, sigma: Scalar, rho: Scalar) -> list[Tensor]:
    """Return (sigma I + rho Q)^-1 r for every matrix, with Q of the form without averages.

    The results are in new memory.

    Args:
        rs: matrices of one device and dtype.
        rule: the choice of Q.
        sigma: the penalty.
        rho: the weight of Q.
    """
    ys = list(rs)
    for scale, indexes in _batches(rs, rule):
        # Up to transposition, under which the resolvent is transposed too.
        wide = [rs[i] if rs[i].size(0) <= rs[i].size(1) else rs[i].mT for i in indexes]
        solutions = _solve(torch.stack(wide), rule, sigma, rho / scale)
        for i, y in zip(indexes, solutions, strict=True):
            ys[i] = y if rs[i].size(0) <= rs[i].size(1) else y.mT
    return ys


def _solve(x: Tensor, rule: Spectral, sigma: Scalar, rho: Scalar) -> Sequence[Tensor]:
    if rule.method != "smooth":
        return rule.solve_matrix(x, {}, sigma, rho, 1)[0].unbind()
    # By the kernels of Newton-Schulz, which compute only half of a symmetric product.
    augmented, scale = spectral.augmented(x, sigma, rho)
    orthogonal = newton_schulz.orthogonalize(augmented.unbind(), rule.ns_steps, rule.dtype)
    return [o[:, : x.size(-1)] / scale for o in orthogonal]


def averaged(
    rs: Sequence[Tensor],
    averages: Sequence[Tensor],
    steps: Sequence[Scalar],
    rule: Spectral,
    sigma: Scalar,
    rho: Scalar,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (sigma I + rho Q)^-1 r with Q of the form with averages, and the new averages.

    Matrices are solved one by one: batches do not speed up eigendecompositions, and step counts may
    differ.
    """
    ys, new_averages = [], []
    for r, average, step in zip(rs, averages, steps, strict=True):
        rho_scaled = rho / rule.scale(r.size(0), r.size(1))
        y, state = rule.solve_matrix(r, {"average": average}, sigma, rho_scaled, step)
        ys.append(y)
        new_averages.append(state["average"])
    return ys, new_averages


def _batches(rs: Sequence[Tensor], rule: Spectral) -> list[tuple[float, list[int]]]:
    """Return batches of matrices of one shape: their scale and their indexes."""
    by_scale: dict[float, list[int]] = {}
    for index, r in enumerate(rs):
        by_scale.setdefault(rule.scale(r.size(0), r.size(1)), []).append(index)
    batches = []
    for scale, indexes in by_scale.items():
        shapes = [(rs[i].size(0), rs[i].size(1)) for i in indexes]
        chunk_bytes = _CPU_CHUNK_BYTES if rs[0].device.type == "cpu" else None
        for chunk in chunks(shapes, rs[0].itemsize, chunk_bytes):
            batches.append((scale, [indexes[i] for i in chunk.indexes]))
    return batches
