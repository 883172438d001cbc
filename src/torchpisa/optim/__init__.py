"""PISA, SISA, NSISA and MISA as torch optimizers."""

from torchpisa.optim import param_groups
from torchpisa.optim.misa import MISA
from torchpisa.optim.nsisa import NSISA
from torchpisa.optim.pisa import PISA
from torchpisa.optim.sisa import SISA

__all__ = ["MISA", "NSISA", "PISA", "SISA", "param_groups"]
