"""scikit-learn's digits, and how many clients share them."""

from functools import lru_cache

import torch
from sklearn.datasets import load_digits

__all__ = ["CLIENTS", "digits"]

CLIENTS = 10


@lru_cache
def digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return training and test data; every fifth image is for the test."""
    bunch = load_digits()
    inputs = torch.tensor(bunch.data, dtype=torch.float32) / 16
    targets = torch.tensor(bunch.target)
    test = torch.arange(len(targets)) % 5 == 0
    return (inputs[~test], targets[~test]), (inputs[test], targets[test])
