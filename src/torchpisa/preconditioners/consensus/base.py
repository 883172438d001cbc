"""The interface of a stage, which changes U matrix by matrix before the orthogonalisation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Stage", "check_names", "is_due"]

# Names of MISA's own state.
_RESERVED = ("dual", "moment", "pending", "rows", "step")


class Stage(ABC):
    r"""A linear map of \(U\) that MISA applies before it orthogonalises the result.

    A subclass is a frozen dataclass: the same object serves every matrix, and the optimizer keeps
    the state. Matrices come in batches of one shape, transposed if they are taller than wide. The
    orthogonalisation forgets the scale of a matrix, so averages need no bias correction. Both
    methods are pure, and do not wait for the device unless a stage says so.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the state; none of `dual`, `moment`, `pending`, `rows` and `step`."""

    @abstractmethod
    def init_state(self, n: int, k: int, like: Tensor) -> dict[str, Tensor]:
        """Return the state of an n x k matrix (n <= k) before the first round, by name.

        Tensors have at least one dimension: if a parameter has several blocks, their states are
        joined along the first.

        Args:
            n: the smaller of rows and columns.
            k: the larger one.
            like: a tensor with the device and the dtype of the optimizer's state.
        """

    @abstractmethod
    def apply(
        self, u: Tensor, g: Tensor, state: Mapping[str, Tensor], round: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        r"""Return the matrices to orthogonalise instead of \(U\), and the state that has changed.

        Args:
            u: \(U\), (c, n, k); must not be modified.
            g: the gradient, summed over the batches of the round; must not be modified.
            state: stacked along a first dimension of size c, in the dtypes it is kept in or, if it
                comes from other processes, in that of u.
            round: the number of rounds done before, one number for all matrices. It is known to the
                host, so it can decide what is done in some rounds only.
        """


def check_names(stage: Stage) -> None:
    """Raise ValueError if a name of a stage's state cannot be used."""
    for name in stage.names:
        if not isinstance(name, str) or not name or "." in name or name in _RESERVED:
            raise ValueError(
                f"names of {type(stage).__name__} must be strings without '.', and none of "
                f"{', '.join(_RESERVED)}, which are reserved, got {name!r}"
            )


def is_due(round: int, every: int) -> bool:
    """Return whether to refresh in this round: in every `every`-th, and at first more often.

    In rounds 0, 1, 2, 4, 8, ... below `every` too: averages change most at first, and a matrix
    whose output goes through a projection that begins at zero has no gradient in the first round.
    """
    return round % every == 0 or (round < every and round & (round - 1) == 0)
