"""PISA, SISA and NSISA: preconditioned inexact stochastic ADMM for PyTorch.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.SISA(model.parameters())
"""

from torchpisa.optim import NSISA, PISA, SISA

__all__ = ["NSISA", "PISA", "SISA", "__version__"]

__version__ = "0.1.0"
