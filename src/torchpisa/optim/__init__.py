"""PISA, SISA and NSISA as torch optimizers."""

from torchpisa.optim import param_groups
from torchpisa.optim.common import Common
from torchpisa.optim.nsisa import NSISA
from torchpisa.optim.pisa import PISA
from torchpisa.optim.sisa import SISA

__all__ = ["NSISA", "PISA", "SISA", "Common", "param_groups"]
