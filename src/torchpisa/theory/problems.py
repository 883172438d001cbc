r"""Problems whose constants can be computed: losses, their gradients, and bounds on both.

A problem is the paper's (2.3): \(m\) batches \(D_i\) with shares \(\alpha_i\), losses
\(F_i(w) = H_i(w; D_i) + \frac{\mu - \lambda}{2} \|w\|^2\) and
\(F_\lambda(w) = \sum_i \alpha_i F_i(w) + \frac{\lambda}{2} \|w\|^2\). Everything is in float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from torchpisa.checks import check_range

__all__ = ["Growth", "LeastSquares", "LogisticRegression", "Problem", "check_pairs"]

# Nodes and weights of the Gauss-Legendre rule on [0, 1], exact for polynomials of degree 5.
_NODES = (0.5 - 0.15**0.5, 0.5, 0.5 + 0.15**0.5)
_WEIGHTS = (5 / 18, 8 / 18, 5 / 18)


class Growth(NamedTuple):
    r"""A lower bound \(F_\lambda(w) \ge F_{\min} + \frac{h}{2} \|w - \bar w\|^2\).

    It bounds the set \(\Omega\) of equation (3.2). For a convex problem \(\bar w\) is the solution
    and the floor is \(F^*\).

    Attributes:
        center: \(\bar w\).
        curvature: \(h > 0\).
        floor: a lower bound of \(F^*\), or \(F^*\) itself.
    """

    center: Tensor
    curvature: float
    floor: float


class Problem(ABC):
    r"""A problem for `certify`.

    A subclass defines the losses (`loss`), the three bounds on the ball
    \(\mathbb{N}(R) = \{w : \|w\| \le R\}\), and `growth`.

    Args:
        sizes: \(|D_i|\), from which \(\alpha_i\) follows, equation (2.1).
        dimension: number of weights.
        weight_decay: \(\mu - \lambda\).
        consensus_decay: \(\lambda\).

    Attributes:
        proven: True if the bounds are proven, False if they are estimates.
    """

    proven: ClassVar[bool] = True

    def __init__(
        self, sizes: Sequence[int], dimension: int, weight_decay: float, consensus_decay: float
    ) -> None:
        check_range("weight_decay", weight_decay, 0, high_open=True)
        check_range("consensus_decay", consensus_decay, 0, high_open=True)
        self.sizes = tuple(sizes)
        self.dimension = dimension
        self.weight_decay = float(weight_decay)
        self.consensus_decay = float(consensus_decay)
        self.alpha = torch.tensor(self.sizes, dtype=torch.float64) / sum(self.sizes)

    @abstractmethod
    def loss(self, i: int, w: Tensor, samples: Tensor | None = None) -> Tensor:
        r"""Return \(H_i(w; B)\), differentiable in w; `samples` are \(B\), by default \(D_i\)."""

    @abstractmethod
    def smoothness(self, i: int, radius: float) -> float:
        r"""Return \(r_i\) of Assumption 3.1, the Lipschitz constant of gradients on the ball."""

    @abstractmethod
    def gradient_bound(self, i: int, radius: float) -> float:
        r"""Return \(\sup \|\nabla F_i(w; B)\|\) over the ball and all \(B \subseteq D_i\)."""

    @abstractmethod
    def gradient_spread(self, i: int, radius: float) -> float:
        r"""Return \(\sup \|\nabla F_i(w; B) - \nabla F_i(w; B')\|\) over ball, \(B\) and \(B'\)."""

    @abstractmethod
    def growth(self) -> Growth:
        """Return a lower bound on the objective's growth; raise ValueError if there is none."""

    @property
    def start(self) -> Tensor:
        r"""Return \(w^0\): zero as in Algorithm 1, unless a problem overrides it."""
        return torch.zeros(self.dimension, dtype=torch.float64)

    @property
    def optimum(self) -> Tensor | None:
        r"""Return the solution \(w^*\), or None if it is not known."""
        return None

    def local_objective(self, i: int, w: Tensor) -> Tensor:
        r"""Return \(F_i(w)\)."""
        return self.loss(i, w) + 0.5 * self.weight_decay * (w @ w)

    def objective(self, w: Tensor) -> Tensor:
        r"""Return \(F_\lambda(w)\)."""
        total = torch.stack([self.local_objective(i, w) for i in range(len(self.sizes))])
        return self.alpha @ total + 0.5 * self.consensus_decay * (w @ w)

    def local_gradient(self, i: int, w: Tensor) -> Tensor:
        r"""Return \(\nabla F_i(w)\)."""
        w = w.detach().requires_grad_()
        return torch.autograd.grad(self.local_objective(i, w), w)[0]

    def gradient(self, w: Tensor) -> Tensor:
        r"""Return \(\nabla F_\lambda(w)\)."""
        w = w.detach().requires_grad_()
        return torch.autograd.grad(self.objective(w), w)[0]

    def change(self, i: int, w: Tensor, step: Tensor) -> float:
        r"""Return \(F_i(w + s) - F_i(w)\) accurately, even for a tiny step.

        A large difference is computed directly, a small one as the integral of the gradient along
        the step.
        """
        before = self.local_objective(i, w)
        direct = self.local_objective(i, w + step) - before
        if direct.abs() > 1e-8 * before.abs():
            return float(direct)
        slopes = [step @ self.local_gradient(i, w + node * step) for node in _NODES]
        return sum(weight * float(slope) for weight, slope in zip(_WEIGHTS, slopes, strict=True))


def check_pairs(batches: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Raise ValueError unless `batches` are pairs of tensors, and at least one."""
    if not len(batches):
        raise ValueError("batches must hold at least one pair of tensors, got none")
    for i, pair in enumerate(batches):
        kinds = [type(x).__name__ for x in pair] if isinstance(pair, tuple | list) else []
        if len(kinds) != 2 or not all(isinstance(x, Tensor) for x in pair):
            got = f"{type(pair).__name__} of {', '.join(kinds)}" if kinds else type(pair).__name__
            raise ValueError(
                f"batches[{i}] must be a pair of tensors, inputs and targets, got a {got}"
            )


class _Linear(Problem):
    """A problem whose losses depend on products a . w."""

    def __init__(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        weight_decay: float,
        consensus_decay: float,
    ) -> None:
        check_pairs(batches)
        self.features = [a.detach().to(torch.float64) for a, _ in batches]
        self.targets = [b.detach().to(torch.float64) for _, b in batches]
        for i, (a, b) in enumerate(zip(self.features, self.targets, strict=True)):
            if a.dim() != 2 or b.shape != a.shape[:1] or not len(a):
                raise ValueError(
                    f"batches[{i}] must be a matrix with one row, and a vector with one entry, per "
                    f"sample, got shapes {tuple(a.shape)} and {tuple(b.shape)}"
                )
        widths = [a.shape[1] for a in self.features]
        if len(set(widths)) != 1:
            raise ValueError(f"batches must hold matrices of one width, got widths {widths}")
        super().__init__(
            [len(a) for a in self.features],
            widths[0],
            weight_decay,
            consensus_decay,
        )

    def _batch(self, i: int, samples: Tensor | None) -> tuple[Tensor, Tensor]:
        a, b = self.features[i], self.targets[i]
        return (a, b) if samples is None else (a[samples], b[samples])

    def _decay_change(self, w: Tensor, step: Tensor) -> float:
        return float(self.weight_decay * (w @ step + 0.5 * (step @ step)))

    @property
    def optimum(self) -> Tensor:
        return self.growth().center


class LeastSquares(_Linear):
    r"""Least squares, \(f(w; (a, b)) = \frac{1}{2} (a^\top w - b)^2\).

    Args:
        batches: per batch its features (a matrix, one sample a row) and targets.
        weight_decay: \(\mu - \lambda\).
        consensus_decay: \(\lambda\).
    """

    def __init__(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        weight_decay: float = 0.0,
        consensus_decay: float = 0.0,
    ) -> None:
        super().__init__(batches, weight_decay, consensus_decay)
        a, b = torch.cat(self.features), torch.cat(self.targets)
        mu = self.weight_decay + self.consensus_decay
        hessian = a.mT @ a / len(a) + mu * torch.eye(self.dimension, dtype=torch.float64)
        values = torch.linalg.eigvalsh(hessian)
        center = torch.linalg.lstsq(hessian, (a.mT @ b / len(a)).unsqueeze(1)).solution.squeeze(1)
        # A curvature within rounding counts as zero.
        curvature = float(values[0]) if values[0] > 1e-12 * values[-1] else 0.0
        self._growth = Growth(center, curvature, float(self.objective(center)))

    def loss(self, i: int, w: Tensor, samples: Tensor | None = None) -> Tensor:
        a, b = self._batch(i, samples)
        return 0.5 * (a @ w - b).square().mean()

    def change(self, i: int, w: Tensor, step: Tensor) -> float:
        a, b = self.features[i], self.targets[i]
        moved = a @ step
        return float(moved @ (a @ w - b + 0.5 * moved)) / len(a) + self._decay_change(w, step)

    def smoothness(self, i: int, radius: float) -> float:
        return float(self.features[i].square().sum(1).max()) + self.weight_decay

    def gradient_bound(self, i: int, radius: float) -> float:
        norm = self.features[i].norm(dim=1)
        largest = float((norm * (norm * radius + self.targets[i].abs())).max())
        return largest + self.weight_decay * radius

    def gradient_spread(self, i: int, radius: float) -> float:
        # The supremum over sets is one over pairs of samples s and t, where the difference is
        # (a_s a_s^T - a_t a_t^T) w - (a_s b_s - a_t b_t); that matrix has rank two.
        a, b = self.features[i], self.targets[i]
        gram = a @ a.mT
        square = gram.diagonal()
        half_sum = 0.5 * (square + square.unsqueeze(1))
        half_difference = 0.5 * (square - square.unsqueeze(1)).abs()
        norm = half_difference + (half_sum.square() - gram.square()).clamp_min(0).sqrt()
        constant = torch.cdist(a * b.unsqueeze(1), a * b.unsqueeze(1))
        return float((norm * radius + constant).max())

    def growth(self) -> Growth:
        if self._growth.curvature == 0:
            raise ValueError(
                "weight_decay + consensus_decay must be > 0 for features without full column rank: "
                "the set Omega of (3.2) is unbounded otherwise"
            )
        return self._growth


class LogisticRegression(_Linear):
    r"""Logistic regression, \(f(w; (a, y)) = \log(1 + e^{-y\, a^\top w})\), \(y = \pm 1\).

    The objective needs \(\mu > 0\): without it \(\Omega\) of (3.2) is unbounded for data that a
    plane separates.

    Args:
        batches: per batch its features (a matrix, one sample a row) and labels, -1 or 1.
        weight_decay: \(\mu - \lambda\).
        consensus_decay: \(\lambda\).
    """

    def __init__(
        self,
        batches: Sequence[tuple[Tensor, Tensor]],
        *,
        weight_decay: float = 0.0,
        consensus_decay: float = 0.1,
    ) -> None:
        super().__init__(batches, weight_decay, consensus_decay)
        labels = torch.cat(self.targets)
        wrong = labels[labels.abs() != 1]
        if len(wrong):
            raise ValueError(f"labels must be -1 or 1, got {wrong[0].item():g}")
        if self.weight_decay + self.consensus_decay == 0:
            raise ValueError(
                "weight_decay + consensus_decay must be > 0: the set Omega of (3.2) is unbounded "
                "otherwise"
            )
        # Rows y a: the loss is softplus of minus their products with w.
        self._rows = [y.unsqueeze(1) * a for a, y in zip(self.features, self.targets, strict=True)]
        self._growth = self._solve()

    def loss(self, i: int, w: Tensor, samples: Tensor | None = None) -> Tensor:
        rows = self._rows[i] if samples is None else self._rows[i][samples]
        return softplus(-(rows @ w), threshold=50).mean()

    def change(self, i: int, w: Tensor, step: Tensor) -> float:
        z, moved = -(self._rows[i] @ w), -(self._rows[i] @ step)
        # log(1 + e^(z + s)) - log(1 + e^z) without the subtraction, where e^s does not overflow.
        exact = torch.log1p(torch.expm1(moved.clamp(-1, 1)) * torch.sigmoid(z))
        plain = softplus(z + moved, threshold=50) - softplus(z, threshold=50)
        mean = torch.where(moved.abs() <= 1, exact, plain).mean()
        return float(mean) + self._decay_change(w, step)

    def smoothness(self, i: int, radius: float) -> float:
        return float(self._rows[i].square().sum(1).max()) / 4 + self.weight_decay

    def gradient_bound(self, i: int, radius: float) -> float:
        return float(self._rows[i].norm(dim=1).max()) + self.weight_decay * radius

    def gradient_spread(self, i: int, radius: float) -> float:
        # Gradients are c a with c in [0, 1], and |c a_s - c' a_t| is largest at a corner.
        rows = self._rows[i]
        return max(float(torch.cdist(rows, rows).max()), float(rows.norm(dim=1).max()))

    def growth(self) -> Growth:
        return self._growth

    def _solve(self) -> Growth:
        """Run Newton's method from zero; the objective is strongly convex, with constant mu."""
        mu = self.weight_decay + self.consensus_decay
        rows = torch.cat(self._rows)
        w = torch.zeros(self.dimension, dtype=torch.float64)
        eye = torch.eye(self.dimension, dtype=torch.float64)
        slope = self.gradient(w)
        for _ in range(100):
            p = torch.sigmoid(-(rows @ w))
            hessian = rows.mT @ (rows * (p * (1 - p)).unsqueeze(1)) / len(rows) + mu * eye
            step = -torch.linalg.solve(hessian, slope)
            scale = 1.0
            while self.gradient(w + scale * step).norm() >= slope.norm() and scale > 1e-6:
                scale /= 2
            if scale <= 1e-6:  # converged to rounding
                break
            w = w + scale * step
            slope = self.gradient(w)
        floor = float(self.objective(w) - slope.square().sum() / (2 * mu))
        return Growth(w, mu, floor)
