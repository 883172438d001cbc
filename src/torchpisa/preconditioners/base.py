r"""Base class of preconditioners: solvers of one batch's local problem, equation (2.13)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from torchpisa.algorithms.pisa import Scalar

if TYPE_CHECKING:
    from torchpisa.preconditioners.spectral import Spectral

__all__ = ["LocalProblem", "Preconditioner", "State", "initial_state", "solve_for_deltas"]

State = Mapping[str, Tensor]

# Names that optimizers and clients use in the dictionaries that hold the preconditioner's state.
_RESERVED = ("arrived", "delta", "dual", "level", "moved", "pending", "sigma", "step")


@dataclass(frozen=True)
class LocalProblem:
    r"""The local problem of batch i for one parameter.

    Attributes:
        param: the parameter, \(w\). Complex parameters have real `grad`, `dual` and `residual`
            with a last dimension of size 2.
        grad: \(g_i\), the L2 term included.
        dual: \(\pi_i\).
        residual: \(r_i = \pi_i + g_i\), clipped if the optimizer clips.
        sigma: \(\sigma_i\) of this round.
        rho: \(\rho_i\).
        weight_decay: \(\mu - \lambda\), already part of `grad`; curvature needs it too.
        step: the number of updates of this parameter by this batch, the current one included.
        present: False if the batch has no gradient for the parameter, which then counts as zero.
    """

    param: Tensor
    grad: Tensor
    dual: Tensor
    residual: Tensor
    sigma: Scalar
    rho: Scalar
    weight_decay: float
    step: Scalar
    present: bool = True


class Preconditioner(ABC):
    r"""A choice of \(Q_i\), which solves \(d_i = -(\sigma_i I + \rho_i Q_i)^{-1} r_i\).

    A subclass implements `solve` and, if it has state, `init`. Both are pure functions: tensors in,
    new tensors out. The optimizer keeps the state, one dictionary per parameter and batch, so one
    object serves all parameters, batches and machines. \(Q_i\) should satisfy
    \(0 \preceq Q_i \preceq \eta_i I\), equation (2.11).

    Attributes:
        clips: True if `solve` uses `residual`, so that the optimizer's `clip` has an effect.
        joint: True if all parameters of a group must be solved together (`solve_all`).
        homogeneous: True if multiplying sigma and rho by a number divides d by it and changes no
            state, as in the formula above. The optimizer needs \(\sigma_i d_i\) only, so it then
            calls `solve` with \(\sigma_i = 1\) and \(\rho_i / \sigma_i\) for \(\rho_i\): no number
            leaves the range of the dtype, however large the penalty has grown.
        proximal: a proximal term for the consensus; None for equation (2.9) as it is.
    """

    clips: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    homogeneous: ClassVar[bool] = False
    proximal: "ClassVar[Spectral | None]" = None

    def init(self, param: Tensor) -> dict[str, Tensor]:
        """Return the initial state of one batch, by name; by default there is none.

        Any name will do but `arrived`, `delta`, `dual`, `level`, `moved`, `pending`, `sigma` and
        `step`.
        """
        return {}

    @abstractmethod
    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the step d of one parameter, shaped like `problem.residual`, and the new state."""

    def solve_all(
        self, problems: Sequence[LocalProblem], states: Sequence[State]
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return the solutions of several parameters; joint preconditioners override it."""
        return [self.solve(problem, state) for problem, state in zip(problems, states, strict=True)]

    def check(self, params: Sequence[Tensor]) -> None:  # noqa: B027 (optional)
        """Raise if `params` are not supported; called before the optimizer changes anything."""

    def diagonal(self, dual: Tensor, state: State, step: Scalar) -> Tensor | None:
        """Return the diagonal of Q after the last solve, for reports; None without one."""
        return None


def solve_for_deltas(
    preconditioner: Preconditioner, problems: Sequence[LocalProblem], states: Sequence[State]
) -> list[tuple[Tensor, dict[str, Tensor]]]:
    r"""Return \(\delta_i = \sigma_i d_i\) and the new state of several parameters."""
    if preconditioner.homogeneous:
        scaled = [replace(each, sigma=1.0, rho=each.rho / each.sigma) for each in problems]
        return preconditioner.solve_all(scaled, states)
    solved = preconditioner.solve_all(problems, states)
    return [
        (problem.sigma * d, new_state)
        for problem, (d, new_state) in zip(problems, solved, strict=True)
    ]


def initial_state(preconditioner: Preconditioner, param: Tensor) -> dict[str, Tensor]:
    """Return the checked result of `preconditioner.init(param)`.

    Raises:
        ValueError: a name is reserved, or a value is not a tensor.
    """
    state = preconditioner.init(param)
    for name, value in state.items():
        if not isinstance(name, str) or not name or "." in name or name in _RESERVED:
            raise ValueError(
                f"names of {type(preconditioner).__name__}.init must be strings without '.', and "
                f"none of {', '.join(_RESERVED)}, which are reserved, got {name!r}"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of {type(preconditioner).__name__}.init must be a tensor, got {value!r}"
            )
    return state
