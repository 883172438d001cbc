r"""Section 3 of the paper in numbers: constants, the merit function, and certificates of runs."""

from torchpisa.theory.blocks import Blocks
from torchpisa.theory.certificate import Certificate, Check, certify
from torchpisa.theory.constants import Constants, constants_of, delta_of
from torchpisa.theory.lagrangian import augmented_lagrangian, merit
from torchpisa.theory.network import Network
from torchpisa.theory.problems import Growth, LeastSquares, LogisticRegression, Problem
from torchpisa.theory.trajectory import Iterate

__all__ = [
    "Blocks",
    "Certificate",
    "Check",
    "Constants",
    "Growth",
    "Iterate",
    "LeastSquares",
    "LogisticRegression",
    "Network",
    "Problem",
    "augmented_lagrangian",
    "certify",
    "constants_of",
    "delta_of",
    "merit",
]
