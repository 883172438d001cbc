"""PISA, SISA, NSISA and MISA: preconditioned inexact stochastic ADMM for PyTorch.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.SISA(model.parameters())
"""

from torchpisa.optim import MISA, NSISA, PISA, SISA

__all__ = ["MISA", "NSISA", "PISA", "SISA", "__version__"]

__version__ = "0.1.0"
