"""Rows of other libraries, which are imported only when they are timed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from benchmarks.rows import ADAMW_BYTES, KERNELS, LR, MATRICES, Named, Row, find_class, plain

__all__ = ["LIBRARIES", "PEERS"]

LIBRARIES = (
    *("dion", "emerging_optimizers", "gram_newton_schulz", "heavyball", "muon_optimizer"),
    *("optimuon", "pytorch_optimizer", "quack_kernels"),
)


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


def _emerging(row: Row, named: Named, compiled: bool) -> torch.optim.Optimizer:
    return plain(replace(row, library=f"{row.library}.orthogonalized_optimizers"), named)


def _of_heavyball(optimizer: str, **more: object) -> Row:
    # It would take the gradients away, which are the same for every step here.
    settings = {"consume_grad": False}
    return Row("heavyball", optimizer, "", settings, compiles=True, make=_heavyball, **more)


def _of_pytorch_optimizer(optimizer: str, *more: object, **named: object) -> Row:
    return Row("pytorch_optimizer", optimizer, *more, **named)


# dion and emerging_optimizers are not on PyPI, so they are installed from their repositories or not
# at all.
_DION = {"use_triton": True}
# What its constructor finds by a search, and prints.
_RESTARTS = {"gram_newton_schulz_restart_iterations": (2,)}
# What AdaptiveMuon's signature asks for; its rows are NorMuon's.
_ADAPTIVE = {"momentum": 0.95, "weight_decay": 0.01, "moment2_method": "normuon"}


# What a library lacks is a row too, which says so. Periods: how often preconditioners are renewed.
PEERS = [
    _of_heavyball("AdamW", moved=ADAMW_BYTES),
    _of_heavyball("Muon", kinds=KERNELS),
    _of_heavyball("SOAP", period=2),
    _of_heavyball("KLShampoo", period=2, note="heavyball's Shampoo"),
    _of_heavyball("AdamMini"),
    _of_pytorch_optimizer("AdamW", moved=ADAMW_BYTES),
    _of_pytorch_optimizer("Muon", kinds=KERNELS, make=_muon),
    _of_pytorch_optimizer(
        *("Muon", "on the short side", {"ns_method": "gram_newton_schulz"}, KERNELS), make=_muon
    ),
    _of_pytorch_optimizer("NorMuon", kinds=KERNELS, make=_muon),
    Row("gram_newton_schulz", "Muon", "", _RESTARTS, MATRICES, compiles=True),
    Row(
        *("gram_newton_schulz", "Muon", "without its kernels"),
        *({"ns_use_kernels": False, **_RESTARTS}, MATRICES),
        compiles=True,
    ),
    Row("muon", "SingleDeviceMuon", kinds=KERNELS),
    Row("dion", "Muon", settings=_DION, kinds=MATRICES),
    Row("dion", "NorMuon", settings=_DION, kinds=MATRICES),
    Row(
        *("emerging_optimizers", "Muon", "symmetric products", {"use_syrk": True}, MATRICES),
        make=_emerging,
    ),
    Row(
        *("emerging_optimizers", "AdaptiveMuon", "NorMuon", _ADAPTIVE, MATRICES),
        make=_emerging,
    ),
    Row("optimuon", "Muon", settings={"normuon": False}, kinds=MATRICES),
    Row("optimuon", "Muon", "NorMuon", {"normuon": True}, MATRICES),
    _of_pytorch_optimizer("SOAP", period=10),
    _of_pytorch_optimizer(
        "Shampoo", kinds=KERNELS, note="on an embedding its matrices would be 50257 x 50257"
    ),
    _of_pytorch_optimizer(
        "ScalableShampoo", note="without its inverse roots, taken every 1,000 steps"
    ),
    _of_pytorch_optimizer("AdamMini", make=_adam_mini),
]
