"""Round results to the dtype in which they are stored."""

import torch
from torch import Tensor

__all__ = ["store"]


def store(target: Tensor, value: Tensor, stochastic: bool) -> None:
    """Write `value` into `target`, rounded to nearest or, for bfloat16, at random.

    Random rounding has an error of zero on average. So steps much smaller than the spacing of
    bfloat16 add up, where rounding to nearest would lose each of them.
    """
    if stochastic and target.dtype == torch.bfloat16:
        value = _rounded(value.float())
    target.copy_(value)


def _rounded(x: Tensor) -> Tensor:
    """Return `x` with the lower half of its bits carried at random into the upper, bfloat16."""
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device)
    bits = (x.contiguous().view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isnan(), x, bits.view(torch.float32))
