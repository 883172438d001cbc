"""What a training with these optimizers is doing: residuals, spread, steps and momentum."""

from torchpisa.diagnostics.watch import Diagnostics

__all__ = ["Diagnostics"]
