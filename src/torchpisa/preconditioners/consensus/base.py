"""What a stage is: a map of U, matrix by matrix, between the average and the orthogonalisation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

__all__ = ["Stage", "is_due"]


class Stage(ABC):
    r"""A linear change of \(U\) that MISA makes before it orthogonalises it.

    A subclass is a frozen dataclass: the same object serves every matrix, and the optimizer keeps
    the state. Matrices come as batches of one shape, turned so that they are no taller than wide.
    What follows forgets the scale of a matrix, so averages need no bias correction. Both methods
    are pure, and neither waits for the device, but where a stage says so.
    """

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """The names of the state; none of `dual`, `moment`, `pending`, `rows` and `step`."""

    @abstractmethod
    def init_state(self, n: int, k: int, like: Tensor) -> dict[str, Tensor]:
        """Return the state of an n x k matrix (n <= k) before the first round, by name.

        Tensors have a dimension or more: where a parameter has `blocks`, those of its blocks are
        joined along the first one.

        Args:
            n: the smaller of rows and columns.
            k: the larger one.
            like: a tensor with the device and the dtype of the optimizer's state.
        """

    @abstractmethod
    def apply(
        self, u: Tensor, g: Tensor, state: Mapping[str, Tensor], round: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        r"""Return what is orthogonalised instead of \(U\), and what of the state is new.

        Args:
            u: \(U\), (c, n, k); not to be written to.
            g: the gradient, added up over the round's batches, likewise.
            state: stacked along a first dimension of size c, in the dtypes it is kept in or, if it
                has come from other processes, in that of u.
            round: rounds that are done, the same number for all matrices. Known to the host, so
                what is not done in every round is decided by it.
        """


def is_due(round: int, every: int) -> bool:
    """Return whether what is refreshed `every` so many rounds is refreshed in this one.

    Before that in rounds 0, 1, 2, 4, 8, ... too: averages change most at first, and matrices before
    a projection that begins at zero have no gradient in the first round.
    """
    return round % every == 0 or (round < every and round & (round - 1) == 0)
