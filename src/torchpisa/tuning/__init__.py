"""Choosing sigma and rho: from gradients, by short runs, or while training."""

from torchpisa.tuning.calibration import calibrate
from torchpisa.tuning.during_training import ResidualBalancing, Restart
from torchpisa.tuning.finder import Finding, Trial, find_sigma

__all__ = ["Finding", "ResidualBalancing", "Restart", "Trial", "calibrate", "find_sigma"]
