"""NSISA (Algorithm 3) as a torch optimizer."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_choice, check_range
from torchpisa.kernels import newton_schulz
from torchpisa.optim import arguments
from torchpisa.optim.param_groups import is_matrix
from torchpisa.optim.peers import DeviceMesh, ProcessGroup
from torchpisa.optim.pisa import PISA
from torchpisa.optim.round import Group, Part, Rule
from torchpisa.optim.sisa import SISA, with_defaults
from torchpisa.penalty import Gamma
from torchpisa.preconditioners import NewtonSchulz

__all__ = ["NSISA"]


def _newton_schulz(group: Group, params: Sequence[Tensor]) -> NewtonSchulz:
    return NewtonSchulz(
        group["momentum"],
        group["nesterov"],
        group["ns_steps"],
        group["perturbation"],
        group["aspect_scaling"],
        newton_schulz.dtype_for(group["ns_dtype"], params),
    )


class NSISA(PISA):
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

    This is the rule for matrices, which include convolutions (flattened to two dimensions).
    Everything else takes SISA's rule in the same consensus. To choose which matrices are
    orthogonalised, give groups `matrix=True` or `False`, or let
    `torchpisa.optim.param_groups.split(model)` leave out embeddings and the output layer.

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
        ns_dtype: dtype of their products: a dtype, None for that of the state, or
            `"auto"`: float16 on GPUs and, for matrices of 131,072 elements or more in all,
            bfloat16 on CPUs that have instructions for it; never for float64 parameters.
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
        gamma: see `PISA`, as for all arguments below; of sigma that follows gradients, none.
        batches: see `PISA`.
        weights: see `PISA`.
        weight_decay: see `PISA`.
        consensus_decay: see `PISA`.
        clip: see `PISA`; of what is not a matrix.
        dual_decay: see `PISA`.
        initial_consensus: see `PISA`.
        nonfinite: see `PISA`.
        maximize: see `PISA`.
        foreach: see `PISA`.
        fused: see `PISA`; of matrices, and of the rest with `sisa_sigma`.
        stochastic_rounding: see `PISA`.
        capturable: see `PISA`.
        state_dtype: see `PISA`.
        process_group: see `PISA`.
        reduce_dtype: see `PISA`.

    Examples:
        >>> import torch, torchpisa
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 4)
        >>> opt = torchpisa.NSISA(model.parameters())
        >>> x = torch.randn(64, 4)
        >>> for step in range(201):
        ...     loss = (model(x) - x.flip(1)).square().mean()
        ...     if step % 100 == 0:
        ...         print(f"{loss.item():.2f}")
        ...     opt.zero_grad()
        ...     loss.backward()
        ...     opt.step()
        1.54
        0.05
        0.00
    """

    _rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("momentum", "nesterov", "ns_steps", "perturbation", "aspect_scaling", "ns_dtype"),
            _newton_schulz,
        ),
        SISA._rules[0]._replace(
            sigma="sisa_sigma", rho="sisa_rho", momentum="sisa_momentum", lr="sisa_lr"
        ),
    )

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
        settings["matrix"] = None
        if sisa_sigma is not None or sisa_rho is not None:
            several = batches != 1 or arguments.has_peers(process_group)
            settings["sisa_sigma"], settings["sisa_rho"] = with_defaults(
                sisa_sigma, sisa_rho, several
            )
        self._start(params, settings)
        arguments.warn_about_unused_momentum(
            "sisa_momentum", sisa_momentum, "sisa_sigma", self.param_groups
        )

    def _parts_of(self, group_index: int, group: Group) -> list[Part]:
        orthogonalizes = group["matrix"] is not False
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for param in group["params"]:
            kinds[0 if orthogonalizes and is_matrix(param) else 1].append(param)
        pairs = zip(kinds, self._rules, strict=True)
        return [Part(group_index, group, params, rule) for params, rule in pairs if params]

    def _check_rules(self, group: Group) -> None:
        check_choice("matrix", group["matrix"], (None, True, False))
        arguments.check_ns_dtype(group["ns_dtype"])
        for rule in self._rules:
            rule.build(group, ())
        arguments.check_penalties(group, "sigma", "rho")
        if group["sisa_sigma"] is not None:
            arguments.check_penalties(group, "sisa_sigma", "sisa_rho")
        elif group["sisa_rho"] is not None:
            raise ValueError(f"sisa_rho must be None without sisa_sigma, got {group['sisa_rho']!r}")
        check_range("sisa_lr", group["sisa_lr"], 0, high_open=True)
        check_range("sisa_momentum", group["sisa_momentum"], 0, 1, high_open=True)
        for entry in group.get("params", ()) if group["matrix"] else ():
            param = entry[1] if isinstance(entry, tuple) else entry
            if isinstance(param, Tensor) and not is_matrix(param):
                raise ValueError(
                    "matrix must be None or False for parameters that are not real matrices, "
                    f"got True for one of shape {tuple(param.shape)}"
                )

    def _check_fused(self, group: Group) -> None:
        # Only matrices must have a fused kernel: the rest, with sigma from gradients, is small.
        if group["fused"] and group["sisa_sigma"] is None:
            group = {**group, "params": [p for p in group["params"] if is_matrix(p)]}
            if group["matrix"] is False:
                group["params"] = []
        super()._check_fused(group)

    def upgrade_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge the groups of earlier versions, which split each group in two."""
        saved = list(state_dict["param_groups"])
        if len(saved) <= len(self.param_groups) or not all(map(_was_split, saved)):
            return state_dict
        groups = []
        for group in self.param_groups:
            kinds = [is_matrix(param) and group["matrix"] is not False for param in group["params"]]
            merged = saved.pop(0)
            numbers = {merged["matrix"]: list(merged["params"])}
            if len(set(kinds)) == 2 and saved:
                second = saved.pop(0)
                numbers[second["matrix"]] = list(second["params"])
                merged = {**merged, "sisa_sigma": second["sigma"], "sisa_rho": second["rho"]}
            elif not merged["matrix"]:
                penalties = {"sisa_sigma": merged["sigma"], "sisa_rho": merged["rho"]}
                merged = {**merged, **penalties, "sigma": group["sigma"], "rho": group["rho"]}
            params = [numbers[kind].pop(0) for kind in kinds if numbers.get(kind)]
            groups.append({**merged, "matrix": group["matrix"], "params": params})
        return {**state_dict, "param_groups": groups + saved}


def _was_split(saved: Any) -> bool:
    """Return whether a group of a state_dict looks like one of the earlier, split groups."""
    return (
        isinstance(saved, dict)
        and isinstance(saved.get("matrix"), bool)
        and isinstance(saved.get("params"), list)
        and {"sigma", "rho"} <= saved.keys()
    )
