"""SISA (Algorithm 2) as a torch optimizer."""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_range
from torchpisa.optim import arguments
from torchpisa.optim.peers import DeviceMesh, ProcessGroup
from torchpisa.optim.pisa import PISA
from torchpisa.optim.round import Group, Rule
from torchpisa.penalty import Gamma
from torchpisa.preconditioners import SecondMoment

__all__ = ["LR", "SISA"]

# The default learning rate in AdamW's terms.
LR = 3e-3


class SISA(PISA):
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

    Without `sigma` and `rho`, sigma follows the gradients of each parameter tensor (the largest
    root mean square that \(\sqrt{m_i}\) has had over the tensor, which never decreases, so it is an
    instance of (2.12)) and `lr` and `momentum` mean what they mean for AdamW, whatever the scale of
    the loss. With them it is Algorithm 2 to the letter, and `lr` is a relative factor.

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        lr: learning rate, a number or a tensor. Without `sigma`, comparable to AdamW's, by default
            3e-3. With it, a factor on all steps, by default 1.
        momentum: the momentum of a typical coordinate, in [0, 1); only without `sigma`.
        sigma: \(\sigma_i^0 > 0\), the penalty: 1/sigma is the step that a constant gradient ends
            up with. One number, or one per batch. If only `rho` is given 0.5, or 2 with several
            batches, which may differ.
        rho: \(\rho_i \ge 0\), the weight of the second moment: 1/rho is comparable to Adam's
            learning rate. One number, or one per batch. If only `sigma` is given 1,000, or 100 with
            several batches.
        scheme: `"adagrad"`, `"rmsprop"` or `"adam"`: Schemes I, II and III of equation (4.4).
        beta: \(\beta_i\) of Schemes II and III, in (0, 1). The published scripts use 0.999; 0.99
            bounds the step after a gradient that comes once in a while three times lower.
        eta: \(\eta_i\), cap of \(\sqrt{m_i}\), equation (4.3).
        eps: added to \(\sqrt{m_i}\); the paper has 0, the published scripts 1e-8.
        gamma: see `PISA`, as for all arguments below; only with `sigma`.
        batches: see `PISA`.
        weights: see `PISA`.
        weight_decay: see `PISA`.
        consensus_decay: see `PISA`.
        clip: see `PISA`.
        dual_decay: see `PISA`.
        initial_consensus: see `PISA`; only with `sigma`.
        nonfinite: see `PISA`.
        maximize: see `PISA`.
        foreach: see `PISA`.
        fused: see `PISA`; only with `sigma`.
        stochastic_rounding: see `PISA`.
        capturable: see `PISA`.
        state_dtype: see `PISA`.
        process_group: see `PISA`.
        reduce_dtype: see `PISA`.

    Examples:
        >>> import torch, torchpisa
        >>> w = torch.nn.Parameter(torch.tensor([3.0]))
        >>> opt = torchpisa.SISA([w], lr=0.03)
        >>> for _ in range(1000):
        ...     opt.zero_grad()
        ...     (0.5 * (w - 1) ** 2).sum().backward()
        ...     opt.step()
        >>> round(w.item(), 2)
        1.0
    """

    _rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("scheme", "beta", "eta", "eps"),
            lambda group, _: SecondMoment(
                group["scheme"], group["beta"], group["eta"], group["eps"]
            ),
        ),
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        *,
        momentum: float = 0.9,
        sigma: float | Sequence[float] | None = None,
        rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eta: float = math.inf,
        eps: float = 0.0,
        gamma: Gamma | Sequence[Gamma] = 1.0,
        batches: int = 1,
        weights: Sequence[float] | None = None,
        weight_decay: float = 0.0,
        consensus_decay: float = 0.0,
        clip: float | None = None,
        dual_decay: float = 1.0,
        initial_consensus: bool = False,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        settings = arguments.of_constructor(locals())
        if sigma is not None or rho is not None:
            several = batches != 1 or arguments.has_peers(process_group)
            settings["sigma"], settings["rho"] = with_defaults(sigma, rho, several)
        if lr is None:
            settings["lr"] = LR if settings["sigma"] is None else 1.0
        self._start(params, settings)
        arguments.warn_about_unused_momentum("momentum", momentum, "sigma", self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group, which joins the open round.

        A group may give sigma where the optimizer does not, or the other way round. Its default lr
        is then the one that goes with its own choice.
        """
        group = arguments.copy_of_group(param_group)
        given = group.get("sigma", self.defaults["sigma"]) is not None
        if given != (self.defaults["sigma"] is not None):
            several = self.batches != 1 or self.peers is not None
            group.setdefault("lr", 1.0 if given else LR)
            group.setdefault("rho", with_defaults(None, None, several)[1] if given else None)
        super().add_param_group(group)
        if given and "lr" in param_group:
            arguments.warn_about_absolute_lr(param_group["lr"], "SISA")

    def _check_rules(self, group: Group) -> None:
        check_range("momentum", group["momentum"], 0, 1, high_open=True)
        if group["sigma"] is None:
            arguments.check_without_sigma(group)
        else:
            arguments.check_penalties(group, "sigma", "rho")
        self._rules[0].build(group, ())


def with_defaults(
    sigma: float | Sequence[float] | None, rho: float | Sequence[float] | None, several: bool
) -> tuple[float | Sequence[float], float | Sequence[float]]:
    """Return sigma and rho, with a default for the one that is None.

    Args:
        sigma: as given.
        rho: as given.
        several: whether a round has several batches. If their data differ their duals grow, and
            need a larger sigma and less momentum than a single dual on mixed data.
    """
    default_sigma, default_rho = (2.0, 100.0) if several else (0.5, 1e3)
    return (
        default_sigma if sigma is None else sigma,
        default_rho if rho is None else rho,
    )
