"""Choices of Q in equation (2.13), one file each, behind one protocol; `consensus` has MISA's."""

from torchpisa.preconditioners.base import LocalProblem, Preconditioner
from torchpisa.preconditioners.hessian import Hessian
from torchpisa.preconditioners.identity import Identity
from torchpisa.preconditioners.newton_schulz import NewtonSchulz
from torchpisa.preconditioners.second_moment import SecondMoment
from torchpisa.preconditioners.spectral import Spectral
from torchpisa.preconditioners.spectral_consensus import SpectralConsensus

__all__ = [
    "Hessian",
    "Identity",
    "LocalProblem",
    "NewtonSchulz",
    "Preconditioner",
    "SecondMoment",
    "Spectral",
    "SpectralConsensus",
]
