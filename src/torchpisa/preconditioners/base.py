r"""What a preconditioner is: the solver of one batch's local problem, equation (2.13)."""

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

# What optimizers and clients keep beside the preconditioner's state, in the same dictionaries.
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
        step: how often this batch has updated this parameter's state, this time included.
        present: False when the batch did not reach the parameter and its loss gradient is zero.
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
    r"""Solves \(d_i = -(\sigma_i I + \rho_i Q_i)^{-1} r_i\) for a \(Q_i\) of its own choosing.

    A subclass implements `solve` and, if it remembers anything, `init`. Both are pure: tensors in,
    new tensors out; the optimizer keeps the state, one dictionary per parameter and batch, so the
    same object serves every parameter, every batch and every machine. \(Q_i\) should satisfy
    \(0 \preceq Q_i \preceq \eta_i I\), equation (2.11).

    Attributes:
        clips: whether `solve` looks at `residual`, so that the optimizer's `clip` acts on it.
        joint: whether all parameters of a group are to be solved at once (`solve_all`).
        homogeneous: whether multiplying sigma and rho by a number divides d by it and changes no
            state, as in the formula above. What is needed is \(\sigma_i d_i\), and `solve` is then
            asked for it directly, with \(\sigma_i = 1\) and \(\rho_i / \sigma_i\) for \(\rho_i\),
            which stays in the range of the dtype however large the penalty has grown.
        proximal: what holds the weights back at the consensus; None for (2.9) as it is.
    """

    clips: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    homogeneous: ClassVar[bool] = False
    proximal: "ClassVar[Spectral | None]" = None

    def init(self, param: Tensor) -> dict[str, Tensor]:
        """Return the state of one batch before the first round, by name; none by default.

        Names are yours to choose, except `dual`, `delta`, `step`, `pending`, `arrived`
        and `moved`.
        """
        return {}

    @abstractmethod
    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the step d of one parameter, shaped like `problem.residual`, and the new state."""

    def solve_all(
        self, problems: Sequence[LocalProblem], states: Sequence[State]
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        """Return `solve` for several parameters; joint preconditioners override it."""
        return [self.solve(problem, state) for problem, state in zip(problems, states, strict=True)]

    def check(self, params: Sequence[Tensor]) -> None:  # noqa: B027 (optional)
        """Raise if `params` cannot be solved for; called before the optimizer changes anything."""

    def diagonal(self, dual: Tensor, state: State, step: Scalar) -> Tensor | None:
        """Return the diagonal of Q as of the last solve, for reports; None if it has none."""
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
    """Return what `preconditioner.init` gives for `param`.

    Raises:
        ValueError: it has a name that is taken, or something that is not a tensor.
    """
    state = preconditioner.init(param)
    for name, value in state.items():
        if not isinstance(name, str) or not name or "." in name or name in _RESERVED:
            raise ValueError(
                f"names of {type(preconditioner).__name__}.init must be strings without '.', and "
                f"none of {', '.join(_RESERVED)}, which are taken, got {name!r}"
            )
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} of {type(preconditioner).__name__}.init must be a tensor, got {value!r}"
            )
    return state
