"""Symmetric matrices in half the memory."""

import torch
from torch import Tensor

__all__ = ["pack", "packed_shape", "unpack"]


def packed_shape(n: int) -> tuple[int, int]:
    """Return the shape of what `pack` makes of an n x n matrix."""
    return (n + 1) // 2, n + 1


def pack(a: Tensor) -> Tensor:
    """Return the lower triangles of matrices, (c, n, n), folded into rectangles.

    Row i of a triangle has i + 1 numbers, and row n - 1 - i the n - i that make n + 1 with them:
    the latter come first, and the former, backwards, last. The middle one of an odd number of rows
    is there twice.
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
