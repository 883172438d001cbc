"""Round results to the dtype in which they are stored."""

import torch
from torch import Tensor

__all__ = ["store"]


def store(target: Tensor, value: Tensor, stochastic: bool) -> None:
    """Write `value` into `target`, rounded to nearest or, for bfloat16, at random.

    Random rounding has an error of zero on average, so steps much smaller than the spacing of
    bfloat16 add up; rounding to nearest would lose each of them.
    """
    if stochastic and target.dtype == torch.bfloat16:
        value = _randomly_rounded(value.float())
    target.copy_(value)


def _randomly_rounded(x: Tensor) -> Tensor:
    """Return float32 `x` rounded at random to a number that bfloat16 holds.

    bfloat16 is the upper half of the bits: random noise in the lower half carries into it as often
    as `x` is close to the next number. The lower half is then cleared.
    """
    noise = torch.randint(2**16, x.shape, dtype=torch.int32, device=x.device)
    bits = (x.contiguous().view(torch.int32) + noise) & -(2**16)
    return torch.where(x.isnan(), x, bits.view(torch.float32))
