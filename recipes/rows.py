"""The paper's hyperparameter table, which the package has as presets."""

from torchpisa.presets import ROWS, Row

__all__ = ["ROWS", "Row"]
