"""The data of a client: a pair of tensors or a map-style dataset."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

__all__ = ["Data", "sample_count", "take_samples"]

Data = tuple[Tensor, Tensor] | Dataset[Any]
"""Inputs and targets of one length, or a map-style dataset of (input, target)."""


def sample_count(data: Data) -> int:
    """Return the number of samples.

    Raises:
        TypeError: the data are neither a pair of tensors nor a map-style dataset.
        ValueError: there are no samples, or the lengths of the tensors differ.
    """
    pair = isinstance(data, tuple) and len(data) == 2
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    # A tensor or array can be indexed like a dataset, but has no targets.
    array = isinstance(data, tuple | list) or hasattr(data, "__array__")
    if (array and not pair) or not indexed:
        raise TypeError(
            "data of a client must be a tuple (inputs, targets) or a map-style dataset with a "
            f"length, got {type(data).__name__}"
            + (f" of {len(data)}" if isinstance(data, tuple | list) else "")
            + (": give its dataset" if isinstance(data, DataLoader) else "")
        )
    if isinstance(data, tuple):
        inputs, targets = data
        if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
            raise TypeError(
                "inputs and targets of a client must be tensors, got "
                f"{type(inputs).__name__} and {type(targets).__name__}: torch.as_tensor makes them"
            )
        if len(inputs) != len(targets):
            raise ValueError(
                "inputs and targets of a client must have one length, got "
                f"{len(inputs)} and {len(targets)}"
            )
        count = len(inputs)
    else:
        count = len(cast(Sequence[Any], data))
    if count < 1:
        raise ValueError(f"data of a client must hold at least one sample, got {count}")
    return count


def take_samples(data: Data, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the samples at `index`, on `device`."""
    if isinstance(data, tuple):
        inputs, targets = (tensor[index.to(tensor.device)] for tensor in data)
    else:
        batch = default_collate([data[i] for i in index.tolist()])
        if not isinstance(batch, list) or [isinstance(t, Tensor) for t in batch] != [True, True]:
            kinds = [type(t).__name__ for t in batch] if isinstance(batch, list) else []
            raise TypeError(
                "samples of a client's dataset must be pairs (input, target) of arrays or "
                f"numbers, got {', '.join(kinds) or type(batch).__name__}"
            )
        inputs, targets = batch
    return inputs.to(device), targets.to(device)
