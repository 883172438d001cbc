"""Bridges to other libraries, one module each; a module is imported only by those who have it."""

from importlib import import_module
from types import ModuleType

# Loaded when they are first named, as in `torchpisa.integrations.timm.register()`.
_MODULES = ("accelerate", "accumulation", "lightning", "ranks", "tianshou", "timm", "transformers")


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
