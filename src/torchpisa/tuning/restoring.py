"""Restore a model, its gradients, random numbers and data after trial runs."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "ModelSnapshot",
    "check_arguments",
    "random_state",
    "restored_afterwards",
    "set_random_state",
]


class ModelSnapshot:
    """A copy of a model's parameters and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies = [tensor.detach().clone() for tensor in self._tensors()]

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the values back, into the same memory."""
        for tensor, copy in zip(self._tensors(), self._copies, strict=True):
            tensor.copy_(copy)

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]


@contextlib.contextmanager
def restored_afterwards(model: nn.Module, data: Iterable[Any]) -> Iterator[ModelSnapshot]:
    """Restore model, gradients, random numbers and order of data at the end.

    Yields:
        The snapshot of the model, to restore it in between.
    """
    snapshot = ModelSnapshot(model)
    gradients = [param.grad for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
    state = random_state(data)
    try:
        yield snapshot
    finally:
        snapshot.restore()
        for param, grad in zip(model.parameters(), gradients, strict=True):
            param.grad = grad
        set_random_state(data, state)


def check_arguments(model: nn.Module, loss: object, data: Iterable[Any]) -> None:
    """Raise unless `model` trains, `loss` is a function of it and `data` starts anew."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_name(model)}")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(
            "model must have a parameter that requires gradients, got "
            f"{sum(1 for _ in model.parameters())} parameters that do not"
        )
    # torch's criteria, such as nn.MSELoss() and functional.mse_loss, take outputs and targets.
    is_criterion = str(getattr(loss, "__module__", "")).startswith("torch.nn.")
    if is_criterion or not callable(loss):
        raise TypeError(
            "loss must be a function of the model and a batch, such as "
            "lambda model, batch: mse_loss(model(batch[0]), batch[1]), got " + _name(loss)
        )
    if not isinstance(data, Iterable) or isinstance(data, Iterator):
        raise ValueError(
            "data must be something that starts anew each time it is gone through, such as a list "
            f"of batches or a DataLoader, got {type(data).__name__}"
        )


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


def _generators(data: object) -> list[torch.Generator]:
    """Return the generators that a DataLoader draws from, besides the global one."""
    owners = [data, getattr(data, "sampler", None), getattr(data, "batch_sampler", None)]
    owners.append(getattr(owners[-1], "sampler", None))
    candidates = [getattr(owner, "generator", None) for owner in owners]
    return [generator for generator in candidates if isinstance(generator, torch.Generator)]


def random_state(data: object) -> dict[str, Any]:
    """Return the state of all generators, those of `data` included."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "data": [generator.get_state() for generator in _generators(data)],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_random_state(data: object, state: dict[str, Any]) -> None:
    """Set the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for generator, saved in zip(_generators(data), state["data"], strict=True):
        generator.set_state(saved)
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
