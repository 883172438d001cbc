"""Small networks as problems, with estimates for constants."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from torchpisa.checks import check_count, check_range
from torchpisa.theory.problems import Growth, Problem, check_pairs

__all__ = ["Network"]


class Network(Problem):
    r"""A small network with its weights as one vector, in float64.

    The suprema of a network's gradients and curvatures over a ball are unknown. They are estimated
    by the largest values at random points and uphill from there, times a factor. So a run may look
    certified, but nothing is proven. Only \(\Omega\) of (3.2) is surely bounded, because the loss
    is not negative and \(\mu > 0\).

    Args:
        module: the network; smooth, or Assumption 3.1 fails. It is copied.
        loss_fn: a function of outputs and targets that returns the mean loss, never negative.
        batches: inputs and targets of each batch.
        weight_decay: \(\mu - \lambda\).
        consensus_decay: \(\lambda\); with `weight_decay` it must be more than 0.
        probes: random points per estimate.
        climbs: steps uphill from each of them.
        safety: factor on the estimates.
        seed: seed of the points.
    """

    proven: ClassVar[bool] = False

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        weight_decay: float = 0.0,
        consensus_decay: float = 0.1,
        probes: int = 4,
        climbs: int = 4,
        safety: float = 2.0,
        seed: int = 0,
    ) -> None:
        check_pairs(batches)
        check_count("probes", probes)
        check_count("climbs", climbs, 0)
        check_range("safety", safety, 1, high_open=True)
        self.module = copy.deepcopy(module).double()
        self.loss_fn = loss_fn
        self.batches = [tuple(map(_double, pair)) for pair in batches]
        self.probes, self.climbs, self.safety, self.seed = probes, climbs, safety, seed
        self._shapes = {name: p.shape for name, p in self.module.named_parameters()}
        sizes = [len(x) for x, _ in self.batches]
        dimension = sum(shape.numel() for shape in self._shapes.values())
        super().__init__(sizes, dimension, weight_decay, consensus_decay)
        if self.weight_decay + self.consensus_decay == 0:
            raise ValueError(
                "weight_decay + consensus_decay must be > 0: the set Omega of (3.2) may be "
                "unbounded otherwise"
            )

    @property
    def start(self) -> Tensor:
        """Return the weights of the module."""
        return torch.cat([p.detach().reshape(-1) for p in self.module.parameters()])

    def loss(self, i: int, w: Tensor, samples: Tensor | None = None) -> Tensor:
        x, y = self.batches[i]
        return self._loss(w, x, y) if samples is None else self._loss(w, x[samples], y[samples])

    def growth(self) -> Growth:
        mu = self.weight_decay + self.consensus_decay
        return Growth(torch.zeros(self.dimension, dtype=torch.float64), mu, 0.0)

    def smoothness(self, i: int, radius: float) -> float:
        curvature = vmap(jacrev(grad(self._sample_loss)), in_dims=(None, 0, 0))
        norms = [
            float(torch.linalg.matrix_norm(curvature(w, *self.batches[i]), ord=2).max())
            for w in self._points(i, radius)
        ]
        return self.safety * max(norms) + self.weight_decay

    def gradient_bound(self, i: int, radius: float) -> float:
        norms = [float(self._gradients(i, w).norm(dim=1).max()) for w in self._points(i, radius)]
        return self.safety * max(norms) + self.weight_decay * radius

    def gradient_spread(self, i: int, radius: float) -> float:
        gradients = [self._gradients(i, w) for w in self._points(i, radius)]
        return self.safety * max(float(torch.cdist(g, g).max()) for g in gradients)

    def _loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        pieces = torch.split(w, [shape.numel() for shape in self._shapes.values()])
        named = {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
        return self.loss_fn(functional_call(self.module, named, (x,)), y)

    def _sample_loss(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(w, x.unsqueeze(0), y.unsqueeze(0))

    def _gradients(self, i: int, w: Tensor) -> Tensor:
        """Return the gradients of all samples of a batch, one per row."""
        rows: Tensor = vmap(grad(self._sample_loss), in_dims=(None, 0, 0))(w, *self.batches[i])
        return rows

    def _points(self, i: int, radius: float) -> list[Tensor]:
        """Return the start, random points of the ball, and points uphill from them."""
        generator = torch.Generator().manual_seed(self.seed)
        climb = grad(lambda w: self._gradients(i, w).square().sum(1).amax())
        points = [self.start * min(1.0, radius / max(float(self.start.norm()), 1e-300))]
        for probe in range(self.probes):
            w = torch.randn(self.dimension, generator=generator, dtype=torch.float64)
            # Some inside, the last ones on the sphere, where most bounds are attained.
            w = w * (radius * math.sqrt((probe + 1) / self.probes) / w.norm())
            points.append(w)
            for step in range(self.climbs):
                slope = climb(w)
                w = w + slope * (radius / (step + 1) / slope.norm().clamp_min(1e-300))
                w = w * min(1.0, radius / float(w.norm()))
                points.append(w)
        return points


def _double(x: Tensor) -> Tensor:
    """Return floating-point tensors in float64, labels unchanged."""
    return x.detach().to(torch.float64) if x.is_floating_point() else x.detach()
