"""The optimizers whose step is timed: ours, torch's, and how they are built."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch.nn import Parameter

from torchpisa.preconditioners.consensus import EigenbasisMoment, Whiten

__all__ = [
    "ADAMW_BYTES",
    "KERNELS",
    "LR",
    "MATRICES",
    "REFERENCES",
    "TORCHPISA_ROWS",
    "Named",
    "Row",
    "find_class",
    "plain",
]

Named = list[tuple[str, Parameter]]

# So small that the parameters stay where they are for thousands of steps with one gradient.
LR = 1e-6

EVERYTHING = ("embedding", "matrix", "kernel", "head", "vector")
MATRICES = ("matrix",)
KERNELS = ("matrix", "kernel")  # of those that flatten convolutions

ADAMW_BYTES = 28.0  # read w, g, m, v; write w, m, v


@dataclass(frozen=True)
class Row:
    """An optimizer with its settings.

    Attributes:
        library: module that has it.
        optimizer: name of the class.
        label: a distinction between rows of one class.
        settings: arguments besides the parameters and lr.
        kinds: the kinds of parameters it is given.
        period: steps after which its work repeats; their mean is what counts.
        moved: bytes per parameter that a step must read and write, if it is elementwise.
        compiles: whether it compiles itself, and can do without.
        note: a remark for readers of the table.
        make: makes the optimizer.
    """

    library: str
    optimizer: str
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = EVERYTHING
    period: int = 1
    moved: float | None = None
    compiles: bool = False
    note: str = ""
    make: "Callable[[Row, Named, bool], torch.optim.Optimizer]" = lambda *args: plain(*args)

    @property
    def name(self) -> str:
        """Return a name such as `torchpisa SISA, fused`."""
        library = self.library.removesuffix(".optim")
        return f"{library} {self.optimizer}" + (f", {self.label}" if self.label else "")

    @property
    def matrices_only(self) -> bool:
        """Return True if embeddings and vectors are left out."""
        return self.kinds != EVERYTHING


class AbsentError(Exception):
    """A library that is not installed, or has no such optimizer of its own."""


def find_class(row: Row) -> Any:
    """Return the optimizer's class, or raise AbsentError with the reason."""
    package = row.library.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise AbsentError(f"{package} is not installed") from None
    module = import_module(row.library)
    cls = getattr(module, row.optimizer, None)
    if cls is None:
        raise AbsentError(f"{row.library} has no {row.optimizer}")
    if cls.__module__.startswith("torch.") and row.library != "torch.optim":
        raise AbsentError(f"{row.library}.{row.optimizer} is torch.optim's")
    return cls


def plain(row: Row, named: Named, compiled: bool = True) -> torch.optim.Optimizer:
    """Build an optimizer from parameters, lr and settings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"lr=\S+ is relative here")  # it is meant to be tiny
        optimizer: torch.optim.Optimizer = find_class(row)(
            [param for _, param in named], lr=LR, **row.settings
        )
    return optimizer


def _sisa_bytes(batches: int = 1, state: int = 4) -> float:
    """Return the bytes that a step moves per float32 parameter, as a mean over a round.

    Always read g, dual and moment, write dual and moment. With one batch, read and write w. With
    several, write their sum, and read it but for the first; the last then reads it again for w.
    """
    local = 4 + 4 * state
    if batches == 1:
        return local + 8
    return local + (state + (batches - 1) * 2 * state + state + 8) / batches


# AdamW does not look for infinities, so what is compared with it does not either.
_ALIKE = {"nonfinite": "ignore"}
_FUSED = {"fused": True, **_ALIKE}
_FOREACH = {"fused": False, "foreach": True, **_ALIKE}


def _sisa(label: str, settings: dict[str, Any], moved: float, period: int = 1) -> Row:
    settings = {"sigma": 0.5, "rho": 1e3, **settings}  # so that it is Algorithm 2
    return Row("torchpisa", "SISA", label, settings, period=period, moved=moved)


# Everybody is measured beside these.
REFERENCES = [
    Row("torch.optim", "AdamW", "fused", {"fused": True}, moved=ADAMW_BYTES),
    Row("torch.optim", "AdamW", "foreach", {"foreach": True}, moved=ADAMW_BYTES),
    Row("torch.optim", "Muon", kinds=MATRICES),
]

# In sets that fit into memory together.
TORCHPISA_ROWS = [
    [
        _sisa("fused", _FUSED, _sisa_bytes()),
        _sisa("foreach", _FOREACH, _sisa_bytes()),
        _sisa("defaults", {}, _sisa_bytes()),
    ],
    [
        _sisa("fused, m=4", {"batches": 4, **_FUSED}, _sisa_bytes(4), period=4),
        _sisa(
            "fused, bfloat16 state", {"state_dtype": torch.bfloat16, **_FUSED}, _sisa_bytes(1, 2)
        ),
    ],
    [
        Row("torchpisa", "NSISA", "defaults", {}, KERNELS),
        Row("torchpisa", "NSISA", "foreach", _FOREACH, KERNELS),
    ],
    [
        Row("torchpisa", "MISA", "defaults", {}, KERNELS),
        Row("torchpisa", "MISA", "whitened", {"before": Whiten()}, KERNELS, period=10),
        Row(
            *("torchpisa", "MISA", "eigenbasis of one side", {"before": EigenbasisMoment()}),
            *(KERNELS, 5),
        ),
    ],
    [
        Row("torchpisa", "SISA", "sigma follows gradients", _ALIKE, moved=_sisa_bytes()),
        Row("torchpisa", "MISA", "all parameters", _ALIKE),
    ],
]
