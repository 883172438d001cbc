"""Use preconditioners of matrices in problems whose weights are one vector."""

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from torchpisa.preconditioners import (
    Identity,
    LocalProblem,
    Preconditioner,
    SecondMoment,
    Spectral,
)
from torchpisa.preconditioners.base import State

__all__ = ["Blocks", "eta_of"]


class Blocks(Preconditioner):
    r"""A vector of weights cut into blocks, which a preconditioner sees as tensors.

    \(Q\) is block diagonal, so \(0 \preceq Q \preceq \eta I\) if that holds for every block.

    Args:
        inner: the preconditioner of the blocks, such as `Spectral(eta=1.0)`.
        shapes: the shapes of the blocks, which follow one another in the vector.
        rest: the preconditioner of blocks with fewer than two dimensions; `inner` by default.

    Attributes:
        eta: the largest \(\eta\) of the blocks.

    Examples:
        >>> import torch
        >>> from torchpisa.preconditioners import Spectral
        >>> from torchpisa.theory import Blocks, LeastSquares, certify
        >>> data = [(torch.eye(4), torch.ones(4)), (torch.eye(4), torch.zeros(4))]
        >>> certify(LeastSquares(data), Blocks(Spectral(eta=1.0), [(2, 2)]), iterations=20).passed
        True
    """

    def __init__(
        self,
        inner: Preconditioner,
        shapes: Sequence[Sequence[int]],
        rest: Preconditioner | None = None,
    ) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.rules = [inner if len(shape) > 1 or rest is None else rest for shape in self.shapes]
        self.eta = max(map(eta_of, self.rules, self.shapes))

    def check(self, params: Sequence[Tensor]) -> None:
        for param in params:
            for rule, block in zip(self.rules, self._cut(param), strict=True):
                rule.check([block])

    def init(self, param: Tensor) -> dict[str, Tensor]:
        blocks = zip(self.rules, self._cut(param), strict=True)
        return {
            f"{name}{number}": value
            for number, (rule, block) in enumerate(blocks)
            for name, value in rule.init(block).items()
        }

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        steps: list[Tensor] = []
        new_state: dict[str, Tensor] = {}
        parts = (self._cut(x) for x in (problem.param, problem.grad, problem.dual))
        blocks = zip(self.rules, *parts, self._cut(problem.residual), strict=True)
        for number, (rule, param, grad, dual, residual) in enumerate(blocks):
            suffix = str(number)
            names = list(rule.init(dual))
            block_state = {name: state[name + suffix] for name in names}
            block = replace(problem, param=param, grad=grad, dual=dual, residual=residual)
            d, new = rule.solve(block, block_state)
            steps.append(d.reshape(-1))
            new_state |= {name + suffix: new[name] for name in names}
        return torch.cat(steps), new_state

    def _cut(self, vector: Tensor) -> list[Tensor]:
        sizes = [prod(shape) for shape in self.shapes]
        if vector.shape != (sum(sizes),):
            raise ValueError(
                f"shapes must be of {vector.numel()} weights together, got {sum(sizes)}: "
                f"{[tuple(shape) for shape in self.shapes]}"
            )
        parts = torch.split(vector, sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]


def eta_of(preconditioner: Preconditioner, shape: Sequence[int]) -> float:
    r"""Return the \(\eta\) that Q of a tensor of this shape stays below, inf if there is none."""
    if isinstance(preconditioner, Identity):
        return 1.0
    eta = float(getattr(preconditioner, "eta", math.inf))
    if isinstance(preconditioner, SecondMoment):
        eta += preconditioner.eps
    if isinstance(preconditioner, Spectral):
        eta /= preconditioner.scale(prod(shape[:1]), prod(shape[1:]))
    return eta
