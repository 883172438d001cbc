"""MISA, an optimizer to put in AdamW's place, and PISA, SISA and NSISA, which it is built on.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.MISA(model.parameters())
"""

from torchpisa.optim import MISA, NSISA, PISA, SISA

__all__ = ["MISA", "NSISA", "PISA", "SISA", "__version__"]

__version__ = "0.1.0"
