"""MISA, an optimizer to put in AdamW's place, and PISA, SISA and NSISA, which it is built on.

>>> import torch, torchpisa
>>> model = torch.nn.Linear(4, 2)
>>> opt = torchpisa.MISA(model.parameters())
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    "presets",
    "registry",
    "theory",
    "tuning",
)

if TYPE_CHECKING:  # type checkers and editors then know what is in them, and what is misspelt
    from torchpisa import algorithms as algorithms
    from torchpisa import data as data
    from torchpisa import diagnostics as diagnostics
    from torchpisa import distributed as distributed
    from torchpisa import federated as federated
    from torchpisa import integrations as integrations
    from torchpisa import optim as optim
    from torchpisa import penalty as penalty
    from torchpisa import preconditioners as preconditioners
    from torchpisa import presets as presets
    from torchpisa import registry as registry
    from torchpisa import theory as theory
    from torchpisa import tuning as tuning
else:

    def __getattr__(name):
        if name not in _SUBMODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SUBMODULES])
