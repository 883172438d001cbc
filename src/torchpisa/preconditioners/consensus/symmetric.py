"""Store symmetric matrices in half the memory."""

import torch
from torch import Tensor

__all__ = ["pack", "packed_shape", "unpack"]


def packed_shape(n: int) -> tuple[int, int]:
    """Return the shape of a packed n x n matrix."""
    return (n + 1) // 2, n + 1


def pack(a: Tensor) -> Tensor:
    """Return the lower triangles of matrices, (c, n, n), folded into rectangles.

    Row i of a triangle has i + 1 numbers and row n - 1 - i has n - i, together n + 1: a packed row
    begins with the latter and ends with the former, reversed. With odd n the middle row is stored
    twice.
    """
    n = a.size(-1)
    half, width = packed_shape(n)
    triangle = a.tril()
    packed = a.new_zeros(len(a), half, width)
    packed[:, :, :n] = triangle[:, n - half :].flip(1)
    packed[:, :, 1:] += triangle[:, :half].flip(2)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Return the symmetric matrices whose lower triangles are packed."""
    half, n = packed.size(1), packed.size(2) - 1
    upper_rows, lower_rows = packed[:, :, 1:].flip(2), packed[:, :, :n].flip(1)
    triangle = torch.cat([upper_rows, lower_rows[:, 2 * half - n :]], dim=1).tril()
    return triangle + triangle.tril(-1).mT
