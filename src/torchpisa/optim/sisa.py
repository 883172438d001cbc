"""SISA, Algorithm 2."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.optim import ranks
from torchpisa.optim.base import ConsensusOptimizer
from torchpisa.optim.common import Common
from torchpisa.optim.rounds import Group
from torchpisa.preconditioners import SecondMoment

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SISA"]


class SISA(ConsensusOptimizer):
    r"""Second moment-based Inexact Stochastic ADMM (Algorithm 2).

    PISA with \(Q_i = \mathrm{Diag}(\sqrt{m_i})\):

    \[
    \begin{aligned}
    r_i &= \pi_i + g_i, &
    d_i &= -\frac{r_i}{\sigma_i + \rho_i \sqrt{m_i}}, \qquad m_i \text{ from } r_i \odot r_i, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, &
    w &\leftarrow w + \frac{\sum_i \alpha_i (\pi_i^{\mathrm{old}} + 2 \sigma_i d_i) - \lambda w}
                          {\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        sigma: \(\sigma_i^0 > 0\), the penalty: 1/sigma is the step that a constant gradient ends
            up with. One number, or one per batch. By default 0.5, or 2 if there are several
            batches, which may differ.
        rho: \(\rho_i \ge 0\), the weight of the second moment: 1/rho is comparable to Adam's
            learning rate. One number, or one per batch. By default 1,000, or 100 if there are
            several batches.
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`: Schemes I, II and III of equation (4.4).
        beta: \(\beta_i\) of Schemes II and III, in (0, 1). The published scripts use 0.999; 0.99
            bounds the step after a gradient that comes once in a while three times lower.
        eta: \(\eta_i\), cap of \(\sqrt{m_i}\), equation (4.3).
        eps: added to \(\sqrt{m_i}\); the paper has 0, the published scripts 1e-8.
        **common: see `torchpisa.optim.Common`.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        sigma: float | Sequence[float] | None = None,
        rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eta: float = math.inf,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        own = {"scheme": scheme, "beta": beta, "eta": eta, "eps": eps}
        sigma, rho = fill_in(sigma, rho, common)
        super().__init__(params, sigma, rho, own, **common)

    def preconditioner(self, group: Group) -> SecondMoment:
        return SecondMoment(group["scheme"], group["beta"], group["eta"], group["eps"])


def fill_in(
    sigma: float | Sequence[float] | None,
    rho: float | Sequence[float] | None,
    common: Common,
    single: tuple[float, float] = (0.5, 1e3),
    several: tuple[float, float] = (2.0, 100.0),
) -> tuple[float | Sequence[float], float | Sequence[float]]:
    """Defaults of sigma and rho; those of SISA's rule if not told. Duals of batches that differ
    grow; they need a larger sigma, and less momentum, than one dual on mixed data does."""
    alone = common.get("batches", 1) == 1 and ranks.join(common.get("process_group"), None) is None
    default_sigma, default_rho = single if alone else several
    return (
        default_sigma if sigma is None else sigma,
        default_rho if rho is None else rho,
    )
