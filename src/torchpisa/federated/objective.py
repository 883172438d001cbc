"""A client's objective: a model, a loss and data, and the gradients of their mean loss."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from torchpisa.federated.algorithms.base import Tensors

__all__ = [
    "Data",
    "Loss",
    "LossError",
    "Objective",
    "accuracy",
    "cross_entropy",
    "size",
    "take",
    "trainable",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per sample."""

Data = tuple[Tensor, Tensor] | Dataset[Any]
"""Inputs and targets of one length, or a map-style dataset of (input, target)."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each sample, averaged over further dimensions, such as those of a text."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def size(data: Data) -> int:
    """Number of samples.

    Raises:
        TypeError: this is neither a pair of tensors nor a map-style dataset.
        ValueError: there are none, or the lengths differ.
    """
    pair = isinstance(data, tuple) and len(data) == 2
    if (isinstance(data, tuple | list) and not pair) or not hasattr(data, "__len__"):
        raise TypeError(
            "data of a client must be a tuple (inputs, targets) or a map-style dataset with a "
            f"length, got {type(data).__name__}"
            + (f" of {len(data)}" if isinstance(data, tuple | list) else "")
        )
    if isinstance(data, tuple):
        inputs, targets = data
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


def take(data: Data, index: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The samples at `index`, on a device."""
    if isinstance(data, tuple):
        inputs, targets = (tensor[index.to(tensor.device)] for tensor in data)
    else:
        inputs, targets = default_collate([data[i] for i in index.tolist()])
    return inputs.to(device), targets.to(device)


def trainable(model: nn.Module) -> Tensors:
    """A copy of the parameters that are trained: those that require a gradient.

    Raises:
        ValueError: there are none.
    """
    found = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("model must have parameters that require a gradient, got none")
    return found


class LossError(ValueError):
    """A loss that does not return one number per sample."""


class Evaluated(NamedTuple):
    """A loss with its graph, for those who need more than the gradient."""

    loss: Tensor
    outputs: Tensor


class Objective:
    """Losses and gradients of a model as functions of its parameters.

    Args:
        model: any module without running statistics: what a client's forward pass leaves in
            buffers would be lost, so layers such as BatchNorm are refused.
        loss: from outputs and targets to one loss per sample.
    """

    def __init__(self, model: nn.Module, loss: Loss = cross_entropy) -> None:
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False):
                raise ValueError(
                    f"model must not keep running statistics, got {type(module).__name__} at "
                    f"{name!r}: use GroupNorm, or track_running_stats=False"
                )
        self.model = model
        self.loss = loss

    def losses(self, weights: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per sample."""
        return self._evaluate(weights, inputs, targets)[1]

    def gradient(self, weights: Tensors, inputs: Tensor, targets: Tensor) -> Tensors:
        """The gradient of the sum of the losses; zero where a parameter has no influence."""
        point = {name: w.detach().requires_grad_() for name, w in weights.items()}
        total = self.losses(point, inputs, targets).sum()
        return self._differentiate(total, point)

    def graph(
        self, weights: Tensors, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensors, Evaluated]:
        """The gradient of the mean loss, the point it was taken at, and the loss with its graph."""
        point = {name: w.detach().requires_grad_() for name, w in weights.items()}
        outputs, losses = self._evaluate(point, inputs, targets)
        loss = losses.mean()
        return self._differentiate(loss, point, keep=True), point, Evaluated(loss, outputs)

    def _evaluate(self, weights: Tensors, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.func.functional_call(self.model, weights, (inputs,))
        losses = self.loss(outputs, targets)
        if losses.shape != targets.shape[:1]:
            raise LossError(
                f"loss must return one number per sample, shape {tuple(targets.shape[:1])}, got "
                f"{tuple(losses.shape)}: pass reduction='none'"
            )
        return outputs, losses

    @staticmethod
    def _differentiate(loss: Tensor, point: Tensors, keep: bool = False) -> Tensors:
        grads = torch.autograd.grad(
            loss, list(point.values()), retain_graph=keep, materialize_grads=True
        )
        return dict(zip(point, grads, strict=True))


def accuracy(
    inputs: Tensor, targets: Tensor, loss: Loss = cross_entropy, chunk: int = 8192
) -> Callable[[nn.Module], dict[str, float]]:
    """A function that measures a classifier on data of its own: `accuracy` in percent, `loss`."""

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        hits = losses = torch.zeros((), dtype=torch.float32, device=device)
        parts = zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True)
        for x, y in parts:
            outputs, y = model(x.to(device)), y.to(device)
            hits = hits + (outputs.argmax(1) == y).sum()
            losses = losses + loss(outputs, y).sum()
        count = targets.numel()
        return {"accuracy": 100 * float(hits) / count, "loss": float(losses) / len(targets)}

    return evaluate
