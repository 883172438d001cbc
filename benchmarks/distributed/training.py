"""The rows that are trained side by side: one model each, and its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from benchmarks.tasks import CharTransformer
from torchpisa import NSISA, SISA
from torchpisa.distributed import attach
from torchpisa.optim import param_groups

__all__ = ["BACKWARD", "FORWARD", "LOCAL", "MODELS", "REFERENCE", "ROWS", "STEP", "Row", "Training"]

# Labels of the parts of a step in a profile.
FORWARD, BACKWARD, LOCAL, STEP = (
    f"benchmark: {p}" for p in ("forward", "backward", "local", "step")
)

REFERENCE = "torch AdamW, DDP"

Made = tuple[nn.Module, list[torch.optim.Optimizer]]


class Size(NamedTuple):
    """A transformer, and the batch of a rank."""

    words: int
    width: int
    heads: int
    layers: int
    context: int
    batch: int


MODELS = {
    "gpt-10m": Size(words=1024, width=384, heads=6, layers=5, context=64, batch=4),
    "tiny": Size(words=16, width=8, heads=2, layers=1, context=4, batch=2),  # for tests
}


@dataclass(frozen=True)
class Row:
    """A way to train.

    Attributes:
        name: its name in the tables.
        make: wraps a model and makes what steps it.
        period: steps after which the work repeats; their mean is what counts.
    """

    name: str
    make: Callable[[nn.Module], Made]
    period: int = 1


class Training:
    """A row in training on one rank, always on the same random batch, a different one per rank."""

    def __init__(self, row: Row, size: Size, seed: int) -> None:
        torch.manual_seed(seed)  # the same weights everywhere
        model = CharTransformer(size.words, size.context, size.width, size.heads, size.layers)
        self.parameters = list(model.parameters())
        self.model, self.optimizers = row.make(model)
        generator = torch.Generator().manual_seed(seed + 1 + distributed.get_rank())
        text = torch.randint(size.words, (size.batch, size.context + 1), generator=generator)
        self._inputs, self._targets = text[:, :-1], text[:, 1:].flatten()

    def step(self) -> None:
        """Do a forward pass, a backward pass and a step."""
        with record_function(FORWARD):
            loss = F.cross_entropy(self.model(self._inputs).flatten(0, 1), self._targets)
        with record_function(BACKWARD):
            loss.backward()
        with record_function(STEP):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def check(self) -> None:
        """Raise if the parameters did not stay finite."""
        if not torch.stack(torch._foreach_norm(self.parameters)).isfinite().all():
            raise FloatingPointError("the parameters did not stay finite")


def _adamw(model: nn.Module) -> Made:
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    return DistributedDataParallel(model), [adamw]


def _muon(model: nn.Module) -> Made:
    hidden, rest = (group["params"] for group in param_groups.split(model))
    return DistributedDataParallel(model), [
        torch.optim.Muon(hidden),
        torch.optim.AdamW(rest, fused=True),
    ]


def _sisa(model: nn.Module, **settings: Any) -> Made:
    settings = {"sigma": 2.0, "rho": 100.0, **settings}
    return model, [SISA(model.parameters(), process_group=distributed.group.WORLD, **settings)]


def _nsisa(model: nn.Module) -> Made:
    settings = {"sisa_sigma": 2.0, "sisa_rho": 100.0}
    groups = param_groups.split(model)
    return model, [NSISA(groups, process_group=distributed.group.WORLD, **settings)]


def _attached(model: nn.Module, make: Callable[..., Made], **settings: Any) -> Made:
    _, (optimizer,) = make(model, **settings)
    parallel = DistributedDataParallel(model)
    attach(optimizer, parallel)
    early = optimizer.step_bucket

    def labelled(*args: Any) -> None:
        with record_function(LOCAL):
            early(*args)

    optimizer.step_bucket = labelled
    return parallel, [optimizer]


# All at their defaults, so ours look for infinities in the gradients and AdamW does not.
ROWS = [
    Row(REFERENCE, _adamw),
    Row("torchpisa SISA, attach", partial(_attached, make=_sisa)),
    Row("torchpisa SISA, process_group only", _sisa),
    Row("torchpisa SISA, attach, m=4", partial(_attached, make=_sisa, batches=4), period=4),
    Row(
        "torchpisa SISA, attach, bfloat16",
        partial(_attached, make=_sisa, reduce_dtype=torch.bfloat16),
    ),
    *([Row("torch Muon and AdamW, DDP", _muon)] if hasattr(torch.optim, "Muon") else []),
    Row("torchpisa NSISA, attach", partial(_attached, make=_nsisa)),
]
