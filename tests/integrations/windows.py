"""A small training in windows of micro-batches, and the plain loop that adapters must equal."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from torchpisa import MISA, NSISA, SISA

STEPS, WINDOWS = 4, 20
CLASSES = 3

# With as many batches as a window has micro-batches. NSISA's and MISA's products are in float32.
OPTIMIZERS = {
    "sisa": lambda params: SISA(params, batches=STEPS),
    "sisa-paper": lambda params: SISA(
        params, batches=STEPS, sigma=1.0, rho=100.0, weights=[1, 2, 3, 4]
    ),
    "nsisa": lambda params: NSISA(params, batches=STEPS, ns_dtype=None),
    "misa": lambda params: MISA(params, batches=STEPS, ns_dtype=None),
}
Make = Callable[[Any], Any]


class Case(NamedTuple):
    """An optimizer for several ranks, and the one of a single process that must do the same."""

    ranked: Make
    plain: Make
    own: bool  # whether ranks keep their gradients, as nodes of a process group


def _world() -> Any:
    return distributed.group.WORLD


CASES = {
    "sisa-mean": Case(OPTIMIZERS["sisa-paper"], OPTIMIZERS["sisa-paper"], own=False),
    "misa-mean": Case(lambda params: MISA(params, ns_dtype=None), OPTIMIZERS["misa"], own=False),
    "sisa-nodes": Case(
        lambda params: SISA(params, batches=STEPS, sigma=1.0, rho=100.0, process_group=_world()),
        lambda params: SISA(params, batches=2 * STEPS, sigma=1.0, rho=100.0),
        own=True,
    ),
    "nsisa-nodes": Case(
        lambda params: NSISA(params, batches=STEPS, ns_dtype=None, process_group=_world()),
        lambda params: NSISA(params, batches=2 * STEPS, ns_dtype=None),
        own=True,
    ),
}


class Net(nn.Module):
    """Two layers, with the loss as Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, CLASSES))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def micro_batches(count: int = STEPS * WINDOWS, size: int = 5) -> list[dict[str, Tensor]]:
    """Micro-batches whose labels depend on the slot, so that duals differ."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        x = torch.randn(size, 6, generator=generator)
        labels = (x[:, 0] > 0).long() + (number % STEPS == 3)
        made.append({"x": x, "labels": labels})
    return made


def plain(
    make: Make,
    batches: Sequence[dict[str, Tensor]],
    *,
    net: nn.Module | None = None,
    max_norm: float | None = None,
    steps: int = STEPS,
) -> nn.Module:
    """Train with one step() per micro-batch; a short last window is flushed."""
    net = model() if net is None else net
    optimizer = make(net.parameters())
    for start in range(0, len(batches), steps):
        for batch in batches[start : start + steps]:
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            optimizer.step()
        optimizer.flush()
    return net


def assert_equal(found: nn.Module, expected: nn.Module, rtol: float = 1e-6) -> None:
    """Compare parameters, each relative to the largest of its tensor; and not to the start."""
    start = dict(model().named_parameters())
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        scale = b.abs().max().item()
        worst = (a - b).abs().max().item() / max(scale, 1e-30)
        assert worst <= rtol, f"{name}: {worst:.1e}"
        if name in start and start[name].shape == b.shape:
            assert (b - start[name]).abs().max() > 1e-3 * scale, f"{name} has not moved"


def scale_losses(accelerator: Any, scaler: torch.amp.GradScaler) -> None:
    """Let an Accelerator that is prepared do all of fp16 but computing in it, as on a GPU.

    On a CPU, Accelerate makes no scaler itself.
    """
    accelerator.scaler = scaler
    accelerator.native_amp = True
    accelerator.state._mixed_precision = "fp16"
