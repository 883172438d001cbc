"""MISA, an optimizer to put in AdamW's place, and PISA, SISA and NSISA, which it is built on.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.MISA(model.parameters())
"""

from importlib import import_module
from types import ModuleType

from torchpisa.optim import MISA, NSISA, PISA, SISA
from torchpisa.registry import create, list_optimizers, list_presets

__all__ = [
    "MISA",
    "NSISA",
    "PISA",
    "SISA",
    "create",
    "list_optimizers",
    "list_presets",
    "__version__",
]

__version__ = "0.1.0"

# Loaded when they are first named, as in `torchpisa.tuning.calibrate`.
_SUBMODULES = (
    "algorithms",
    "data",
    "diagnostics",
    "distributed",
    "federated",
    "integrations",
    "optim",
    "penalty",
    "preconditioners",
    "theory",
    "tuning",
)


def __getattr__(name: str) -> ModuleType:
    if name not in _SUBMODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES})
