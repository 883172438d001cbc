"""Rows of other libraries, imported only when they are timed: heavyball and pytorch_optimizer."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from benchmarks.rows import ADAMW_BYTES, KERNELS, LR, Named, Row, find_class, plain

__all__ = ["LIBRARIES", "PEERS"]

LIBRARIES = ("heavyball", "pytorch_optimizer")


def _heavyball(row: Row, named: Named, compiled: bool) -> torch.optim.Optimizer:
    find_class(row)  # before anything else, for its message
    import heavyball

    # As its users get it, or not at all; it asks for the mode whenever it steps.
    usual = _usual_compile_mode()
    heavyball.utils.compile_mode = usual if compiled else None
    return plain(row, named)


@cache
def _usual_compile_mode() -> str | None:
    import heavyball

    mode: str | None = heavyball.utils.compile_mode
    return mode


def _muon(row: Row, named: Named, compiled: bool) -> torch.optim.Optimizer:
    groups = [{"params": [param for _, param in named], "use_muon": True, "lr": LR}]
    optimizer: torch.optim.Optimizer = find_class(row)(groups, **row.settings)
    return optimizer


class _Model(nn.Module):
    """A model that is its named parameters and nothing else."""

    def __init__(self, named: Named) -> None:
        super().__init__()
        self.named = named

    def named_parameters(
        self, *args: object, **kwargs: object
    ) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.named


def _adam_mini(row: Row, named: Named, compiled: bool) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = find_class(row)(_Model(named), lr=LR, **row.settings)
    return optimizer


def _of_heavyball(optimizer: str, **more: object) -> Row:
    # It would take the gradients away, which are the same for every step here.
    settings = {"consume_grad": False}
    return Row("heavyball", optimizer, "", settings, compiles=True, make=_heavyball, **more)


def _of_pytorch_optimizer(optimizer: str, **more: object) -> Row:
    return Row("pytorch_optimizer", optimizer, **more)


# What a library lacks is a row too, which says so. Periods: how often preconditioners are renewed.
PEERS = [
    _of_heavyball("AdamW", moved=ADAMW_BYTES),
    _of_heavyball("Muon", kinds=KERNELS),
    _of_heavyball("SOAP", period=2),
    _of_heavyball("KLShampoo", period=2, note="heavyball's Shampoo"),
    _of_heavyball("AdamMini"),
    _of_pytorch_optimizer("AdamW", moved=ADAMW_BYTES),
    _of_pytorch_optimizer("Muon", kinds=KERNELS, make=_muon),
    _of_pytorch_optimizer("SOAP", period=10),
    _of_pytorch_optimizer(
        "Shampoo", kinds=KERNELS, note="on an embedding its matrices would be 50257 x 50257"
    ),
    _of_pytorch_optimizer(
        "ScalableShampoo", note="without its inverse roots, taken every 1,000 steps"
    ),
    _of_pytorch_optimizer("AdamMini", make=_adam_mini),
]
