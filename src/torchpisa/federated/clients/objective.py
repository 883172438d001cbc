"""A client's objective: a model and a loss, and the gradients of the mean loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchpisa.checks import check_count
from torchpisa.federated.algorithms.base import Tensors

__all__ = [
    "BufferChangeError",
    "Loss",
    "LossError",
    "Objective",
    "accuracy",
    "check_loss",
    "cross_entropy",
    "trainable",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to one loss per sample."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, averaged over positions in the case of texts."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def trainable(model: nn.Module) -> Tensors:
    """Return a copy of the parameters that require a gradient.

    Raises:
        ValueError: there are none.
    """
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    if not weights:
        raise ValueError("model must have parameters that require a gradient, got none")
    return weights


def check_loss(loss: Any) -> None:
    """Raise TypeError unless `loss` is a function; one class of torch's is a likely mistake."""
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(
            "loss must be a function of outputs and targets, such as "
            f"torch.nn.CrossEntropyLoss(reduction='none'), got {loss!r}"
        )


class LossError(ValueError):
    """A loss that does not return one number per sample."""


class BufferChangeError(ValueError):
    """A model whose forward pass changes its buffers."""


class LossGraph(NamedTuple):
    """A loss and the outputs it was computed from, with their graph."""

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
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        check_loss(loss)
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False):
                raise ValueError(
                    f"model must not keep running statistics, got {type(module).__name__} at "
                    f"{name!r}: use GroupNorm, or track_running_stats=False"
                )
        self.model = model
        self.loss = loss
        parameters = list(model.named_parameters(remove_duplicate=False))
        # Looking for tied weights in every call would take longer than a small layer.
        self._tied = len(parameters) > len({id(p) for _, p in parameters})

    @contextmanager
    def unchanged_buffers(self) -> Iterator[None]:
        """Raise BufferChangeError if what runs inside changes a buffer, as running statistics do.

        A buffer that is replaced by one of another shape is a cache, such as that of positions.
        """
        before = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}
        yield
        for name, buffer in self.model.named_buffers():
            old, version = before.get(name, (buffer, buffer._version))
            replaced = buffer.shape == old.shape and not torch.equal(buffer, old)
            if old._version != version or (buffer is not old and replaced):
                raise BufferChangeError(
                    f"model must not change its buffers, as its forward pass does with {name!r}: "
                    "what a client leaves there would be lost, or pass to other clients"
                )

    def losses(self, weights: Tensors, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per sample."""
        return self._evaluate(weights, inputs, targets)[1]

    def gradient(self, weights: Tensors, inputs: Tensor, targets: Tensor, count: int) -> Tensors:
        """Return the part of these samples in the gradient of the mean loss over `count`.

        It is zero for a parameter without influence.
        """
        point = {name: w.detach().requires_grad_() for name, w in weights.items()}
        loss = self.losses(point, inputs, targets).sum() / count
        return self._differentiate(loss, point)

    def gradient_and_graph(
        self, weights: Tensors, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensors, Tensors, LossGraph]:
        """Return the mean loss's gradient, the point it was taken at, and the loss's graph."""
        point = {name: w.detach().requires_grad_() for name, w in weights.items()}
        outputs, losses = self._evaluate(point, inputs, targets)
        loss = losses.mean()
        return self._differentiate(loss, point, retain_graph=True), point, LossGraph(loss, outputs)

    def _evaluate(self, weights: Tensors, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        outputs = torch.func.functional_call(self.model, weights, (inputs,), tie_weights=self._tied)
        losses = self.loss(outputs, targets)
        if losses.shape != targets.shape[:1]:
            remedy = "pass reduction='none'"
            if losses.ndim > 1:
                shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}"
                remedy = f"take the mean over all dimensions but the first; {shapes} must fit"
            raise LossError(
                f"loss must return one number per sample, shape {tuple(targets.shape[:1])}, got "
                f"{tuple(losses.shape)}: {remedy}"
            )
        return outputs, losses

    @staticmethod
    def _differentiate(loss: Tensor, point: Tensors, retain_graph: bool = False) -> Tensors:
        grads = torch.autograd.grad(
            loss, list(point.values()), retain_graph=retain_graph, materialize_grads=True
        )
        return dict(zip(point, grads, strict=True))


def accuracy(
    inputs: Tensor, targets: Tensor, loss: Loss = cross_entropy, chunk: int = 8192
) -> Callable[[nn.Module], dict[str, float]]:
    """Return a function that measures a classifier: `accuracy` in percent, and `loss`.

    Raises:
        TypeError: inputs and targets are not tensors.
        ValueError: they are empty or of different lengths.
    """
    if not all(isinstance(given, Tensor) for given in (inputs, targets)):
        kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
        raise TypeError(f"inputs and targets must be tensors, got {kinds}")
    if len(inputs) != len(targets) or not len(targets):
        raise ValueError(
            "inputs and targets must have one length, at least 1, got "
            f"{len(inputs)} and {len(targets)}"
        )
    check_count("chunk", chunk)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        hits = losses = torch.zeros((), dtype=torch.float32, device=device)
        parts = zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True)
        for x, y in parts:
            outputs, y = model(x.to(device)), y.to(device)
            classes = outputs.argmax(1)
            if classes.shape != y.shape:
                raise ValueError(
                    "targets must be one class per sample (or position of a text), shape "
                    f"{tuple(classes.shape)}, got {tuple(y.shape)}"
                )
            hits = hits + (classes == y).sum()
            losses = losses + loss(outputs, y).sum()
        count = targets.numel()
        return {"accuracy": 100 * float(hits) / count, "loss": float(losses) / len(targets)}

    return evaluate
