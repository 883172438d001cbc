"""What NSISA and MISA share: one rule for matrices, SISA's for the rest, in one consensus."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from torchpisa.algorithms.sisa import Scheme
from torchpisa.checks import check_choice
from torchpisa.kernels import newton_schulz
from torchpisa.optim import arguments
from torchpisa.optim.base import ConsensusOptimizer
from torchpisa.optim.common import Common
from torchpisa.optim.param_groups import is_matrix
from torchpisa.optim.rounds import Group
from torchpisa.optim.sisa import fill_in
from torchpisa.preconditioners import Preconditioner, SecondMoment

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MatrixOptimizer"]


class MatrixOptimizer(ConsensusOptimizer):
    """A consensus optimizer that splits parameter groups into matrices and the rest.

    A group says by `matrix` which of the two it is; one that does not say is split.
    """

    def __init__(
        self,
        params: ParamsT,
        sigma: float | Sequence[float],
        rho: float | Sequence[float],
        own: dict[str, Any],
        *,
        sisa_sigma: float | Sequence[float] | None,
        sisa_rho: float | Sequence[float] | None,
        scheme: Scheme = "adam",
        beta: float = 0.99,
        eta: float = math.inf,
        eps: float = 0.0,
        **common: "Unpack[Common]",
    ) -> None:
        sisa_sigma, sisa_rho = fill_in(sisa_sigma, sisa_rho, common)
        settings = {
            "matrix": True,
            **own,
            "sisa_sigma": sisa_sigma,
            "sisa_rho": sisa_rho,
            "scheme": scheme,
            "beta": beta,
            "eta": eta,
            "eps": eps,
        }
        super().__init__(params, sigma, rho, settings, **common)

    @abstractmethod
    def _matrix_preconditioner(self, group: Group) -> Preconditioner:
        """The preconditioner of a group of matrices."""

    def preconditioner(self, group: Group) -> Preconditioner:
        if group["matrix"]:
            return self._matrix_preconditioner(group)
        return SecondMoment(group["scheme"], group["beta"], group["eta"], group["eps"])

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group: as one of matrices and one of the rest, unless it says which."""
        params = param_group["params"]
        if isinstance(params, set):  # torch refuses sets, with the reason
            super().add_param_group(param_group)
        entries = [params] if isinstance(params, Tensor) else list(params)
        kinds: dict[bool, list[object]] = {True: [], False: []}
        for entry in entries:
            kinds[is_matrix(_tensor(entry))].append(entry)
        if "matrix" in param_group:
            kinds = {param_group["matrix"]: entries}
        before = len(self.param_groups)
        try:
            for matrix, of_kind in kinds.items():
                if of_kind:
                    self._add({**param_group, "params": of_kind, "matrix": matrix})
        except Exception:
            del self.param_groups[before:]
            raise

    def _add(self, group: Group) -> None:
        if not group["matrix"]:
            for name in ("sigma", "rho"):
                group = {name: group.get(f"sisa_{name}", self.defaults[f"sisa_{name}"]), **group}
        super().add_param_group(group)

    @staticmethod
    def _ns_dtype(group: Group) -> torch.dtype | None:
        """What Newton-Schulz is computed in for a group."""
        dtype: torch.dtype | str | None = group["ns_dtype"]
        if isinstance(dtype, str):
            return newton_schulz.fast_dtype(group["params"])
        return dtype

    def _check_own(self, group: Group) -> None:
        check_choice("matrix", group["matrix"], (True, False))
        arguments.check_ns_dtype(group["ns_dtype"])
        for matrix in (True, False):  # a group may be split, so both rules must hold
            self.preconditioner({**group, "params": [], "matrix": matrix})
        for name, check in (("sigma", arguments.check_sigma), ("rho", arguments.check_rho)):
            arguments.per_batch(f"sisa_{name}", group[f"sisa_{name}"], group["batches"], check)
        if group["matrix"]:
            for param in map(_tensor, group.get("params", [])):
                if isinstance(param, Tensor) and not is_matrix(param):
                    raise ValueError(
                        "matrix must be False for parameters that are not real matrices, "
                        f"got {group['matrix']!r} for one of shape {tuple(param.shape)}"
                    )


def _tensor(entry: object) -> object:
    """The parameter of a plain or a named entry."""
    return entry[1] if isinstance(entry, tuple) else entry
