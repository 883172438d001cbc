"""NSISA, Algorithm 3."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_choice, check_range
from torchpisa.kernels import newton_schulz
from torchpisa.optim import arguments
from torchpisa.optim.base import ConsensusOptimizer
from torchpisa.optim.common import Common
from torchpisa.optim.param_groups import is_matrix
from torchpisa.optim.rounds import Group
from torchpisa.optim.sisa import fill_in
from torchpisa.preconditioners import NewtonSchulz, Preconditioner, SecondMoment

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["NSISA"]


class NSISA(ConsensusOptimizer):
    r"""Newton-Schulz-based Inexact Stochastic ADMM (Algorithm 3).

    \[
    \begin{aligned}
    b_i &\leftarrow \mu_i b_i + g_i, \qquad o_i = \mathtt{NewtonSchulz}(b_i), \\
    d_i &= -\frac{\pi_i + o_i + \epsilon_i^{\ell+1} v_i}{\sigma_i + \rho_i |\pi_i + o_i|}, \\
    \pi_i &\leftarrow \pi_i + \sigma_i d_i, \qquad
    w \leftarrow w + \frac{\sum_i \alpha_i (\pi_i^{\mathrm{old}} + 2 \sigma_i d_i) - \lambda w}
                          {\sum_i \alpha_i \sigma_i + \lambda}.
    \end{aligned}
    \]

    That is for matrices, convolutions (flattened to two dimensions) among them. Everything else
    takes SISA's rule in the same consensus. Each parameter group is split into these two kinds, the
    matrices first; to decide yourself, give groups `matrix=True` or `False`, or let
    `torchpisa.optim.param_groups.split(model)` keep embeddings and the output layer from being
    orthogonalised.

    With batches that differ, NSISA as printed settles where \(\sum_i \alpha_i o_i = 0\), which is
    not a stationary point of the loss. Use SISA or MISA for uneven data.

    Args:
        params: parameters or parameter groups; groups may override everything but `batches`,
            `weights`, `clip` and `nonfinite`.
        lr: relative learning rate, a number or a tensor: it divides sigma and rho.
        sigma: \(\sigma_i^0 > 0\) for matrices: 1/sigma is comparable to Muon's learning rate. One
            number, or one per batch.
        rho: \(\rho_i \ge 0\) for matrices. One number, or one per batch.
        momentum: \(\mu_i\) in [0, 1).
        nesterov: orthogonalise \(g_i + \mu_i b_i\), as the published GPT-2 script does.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: what their products are computed in: a dtype, None for that of the state, or
            `"auto"`: bfloat16 on GPUs and, for a million elements or more, on CPUs that have
            instructions for it; never for float64 parameters.
        perturbation: \(\epsilon_i\) in [0, 1); it stands in where \(\pi_i + o_i\) is exactly zero.
        aspect_scaling: multiply \(o_i\) by \(\sqrt{\max(1, \mathrm{rows}/\mathrm{cols})}\), as the
            published GPT-2 script does.
        sisa_lr: learning rate of what is not a matrix, in AdamW's terms; multiplied by `lr`, which
            is relative. Only without `sisa_sigma`, like the next.
        sisa_momentum: momentum of what is not a matrix.
        sisa_sigma: sigma of what is not a matrix, in the paper's terms; by default it follows the
            gradients, see `SISA`.
        sisa_rho: rho of what is not a matrix, with `sisa_sigma`.
        scheme: see `SISA`; likewise `beta`, `eta` and `eps`.
        beta: see `SISA`.
        eta: see `SISA`.
        eps: see `SISA`.
        **common: see `torchpisa.optim.Common`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        sigma: float | Sequence[float] = 80.0,
        rho: float | Sequence[float] = 100.0,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | Literal["auto"] | None = "auto",
        perturbation: float = 1e-8,
        aspect_scaling: bool = False,
        sisa_lr: float = 3e-3,
        sisa_momentum: float = 0.9,
        sisa_sigma: float | Sequence[float] | None = None,
        sisa_rho: float | Sequence[float] | None = None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eta: float = math.inf,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        if sisa_sigma is not None or sisa_rho is not None:
            sisa_sigma, sisa_rho = fill_in(sisa_sigma, sisa_rho, common)
        own = {
            "matrix": True,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "perturbation": perturbation,
            "aspect_scaling": aspect_scaling,
            "sisa_lr": sisa_lr,
            "sisa_momentum": sisa_momentum,
            "sisa_sigma": sisa_sigma,
            "sisa_rho": sisa_rho,
            "scheme": scheme,
            "beta": beta,
            "eta": eta,
            "eps": eps,
        }
        super().__init__(params, sigma, rho, lr, own, **common)

    def preconditioner(self, group: Group) -> Preconditioner:
        if not group["matrix"]:
            return SecondMoment(group["scheme"], group["beta"], group["eta"], group["eps"])
        dtype = group["ns_dtype"]
        if isinstance(dtype, str):
            dtype = newton_schulz.fast_dtype(group["params"])
        return NewtonSchulz(
            group["momentum"],
            group["nesterov"],
            group["ns_steps"],
            group["perturbation"],
            group["aspect_scaling"],
            dtype,
        )

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group: as one of matrices and one of the rest, unless it says which."""
        params = param_group["params"]
        if isinstance(params, set):  # torch refuses sets, with the reason
            super().add_param_group(param_group)
        entries = [params] if isinstance(params, Tensor) else list(params)
        kinds: dict[bool, list[object]] = {True: [], False: []}
        for entry in entries:
            kinds[is_matrix(_tensor(entry))].append(entry)
        if "matrix" in param_group or not entries:
            kinds = {param_group.get("matrix", True): entries}
        before = len(self.param_groups)
        try:
            for matrix, of_kind in kinds.items():
                if of_kind or not entries:
                    self._add({**param_group, "params": of_kind, "matrix": matrix})
        except Exception:
            self._take_back(before)
            raise

    def _add(self, group: Group) -> None:
        if not group["matrix"]:
            # The group's sigma and rho are for matrices.
            for name in ("sigma", "rho"):
                group[name] = group.get(f"sisa_{name}", self.defaults[f"sisa_{name}"])
            if group["sigma"] is None:
                # Nothing of sigma is left to be divided, or to begin with.
                group.update(gamma=1.0, initial_consensus=False)
            lr = group.get("lr", self.defaults["lr"])
            if isinstance(lr, Tensor):
                # One of its own: a scheduler that changes the other's in place would do it twice.
                group["lr"] = lr.clone()
        super().add_param_group(group)

    def _take_back(self, number: int) -> None:
        """Remove the groups from `number` on, with all that they have brought."""
        gone = {id(param) for group in self.param_groups[number:] for param in group["params"]}
        del self.param_groups[number:]
        for param in [param for param in self.state if id(param) in gone]:
            del self.state[param]
        self._params = [param for param in self._params if id(param) not in gone]

    def _check_own(self, group: Group) -> None:
        check_choice("matrix", group["matrix"], (True, False))
        arguments.check_ns_dtype(group["ns_dtype"])
        for matrix in (True, False):  # a group may be split, so both rules must hold
            self.preconditioner({**group, "params": [], "matrix": matrix})
        check_range("sisa_lr", group["sisa_lr"], 0, high_open=True)
        check_range("sisa_momentum", group["sisa_momentum"], 0, 1, high_open=True)
        for name, check in (("sigma", arguments.check_sigma), ("rho", arguments.check_rho)):
            if group[f"sisa_{name}"] is not None:
                arguments.per_batch(f"sisa_{name}", group[f"sisa_{name}"], group["batches"], check)
        if group["matrix"]:
            for param in map(_tensor, group.get("params", [])):
                if isinstance(param, Tensor) and not is_matrix(param):
                    raise ValueError(
                        "matrix must be False for parameters that are not real matrices, "
                        f"got {group['matrix']!r} for one of shape {tuple(param.shape)}"
                    )


def _tensor(entry: object) -> object:
    """Return the parameter of a plain or a named entry."""
    return entry[1] if isinstance(entry, tuple) else entry
