"""Measurements of a training with these optimizers: residuals, spread, steps and momentum."""

from torchpisa.diagnostics.diagnostics import Diagnostics

__all__ = ["Diagnostics"]
