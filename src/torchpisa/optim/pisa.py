"""PISA, Algorithm 1."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.optim.base import ConsensusOptimizer
from torchpisa.optim.common import Common
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import Identity, Preconditioner

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["PISA"]


class PISA(ConsensusOptimizer):
    r"""Preconditioned Inexact Stochastic ADMM (Algorithm 1) with a preconditioner of your choice.

    \[
    \begin{aligned}
    d_i &= -(\sigma_i I + \rho_i Q_i)^{-1} (\pi_i + g_i), &
    u_i &= \pi_i + 2 \sigma_i d_i, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, &
    w &\leftarrow w + \frac{\sum_i \alpha_i u_i - \lambda w}{\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        preconditioner: \(Q_i\), a `torchpisa.preconditioners.Preconditioner`; by default
            `Identity()`.
        lr: relative learning rate, a number or a tensor: it divides sigma and rho.
        sigma: \(\sigma_i^0 > 0\), the penalty: 1/sigma is the step that a constant gradient ends
            up with. One number, or one per batch.
        rho: \(\rho_i \ge 0\), the weight of the preconditioner. One number, or one per batch.
        **common: see `torchpisa.optim.Common`.

    Examples:
        >>> import torch, torchpisa
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = torchpisa.PISA([w], sigma=1.0, rho=4.0)
        >>> for _ in range(100):
        ...     opt.zero_grad()
        ...     (0.5 * (w - 1) ** 2).sum().backward()
        ...     opt.step()
        >>> round(w.item(), 4)
        1.0
    """

    def __init__(
        self,
        params: ParamsT,
        preconditioner: Preconditioner | None = None,
        *,
        lr: float | Tensor = 1.0,
        sigma: float | Sequence[float] = 1.0,
        rho: float | Sequence[float] = 10.0,
        **common: "Unpack[Common]",
    ) -> None:
        super().__init__(
            params, sigma, rho, lr, {"preconditioner": preconditioner or Identity()}, **common
        )

    def preconditioner(self, group: Group) -> Preconditioner:
        chosen: Preconditioner = group["preconditioner"]
        return chosen

    def _check_own(self, group: Group) -> None:
        if not isinstance(group["preconditioner"], Preconditioner):
            raise ValueError(
                "preconditioner must be a torchpisa.preconditioners.Preconditioner, "
                f"got {group['preconditioner']!r}"
            )
