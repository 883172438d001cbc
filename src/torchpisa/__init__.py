"""MISA, an optimizer to put in AdamW's place, and PISA, SISA and NSISA, which it is built on.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.MISA(model.parameters())
"""

from torchpisa.optim import MISA, NSISA, PISA, SISA
from torchpisa.registry import create, list_optimizers, list_presets

__all__ = [
    "MISA",
    "NSISA",
    "PISA",
    "SISA",
    "create",
    "list_optimizers",
    "list_presets",
    "__version__",
]

__version__ = "0.1.0"
