"""PISA, SISA and NSISA on many processes: each rank or replica is a node with its own duals."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpisa.distributed.checkpoint import export, latest, load, save
    from torchpisa.distributed.ddp import attach
    from torchpisa.distributed.fsdp import shard

__all__ = ["attach", "export", "latest", "load", "save", "shard"]

_MODULES = {"attach": "ddp", "shard": "fsdp"}


def __getattr__(name: str) -> Any:
    # Loaded when named: the optimizers, on which these build, import `dtensor` from here.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'checkpoint')}"), name)
