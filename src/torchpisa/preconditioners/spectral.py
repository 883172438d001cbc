"""Q from the singular values of a matrix."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchpisa.algorithms import spectral
from torchpisa.algorithms.misa import RMS
from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State

__all__ = ["Spectral", "as_matrix"]

Method = Literal["auto", "svd", "gram", "polar", "smooth"]
"""How the memoryless form is computed."""


@dataclass(frozen=True)
class Spectral(Preconditioner):
    r"""\(Q_i = \min((r_i r_i^\top)^{1/2}, \eta_i)\): ours, not the paper's.

    For matrices; a tensor of more dimensions (a convolution) is flattened to rows of its first one.
    \(d_i = -(\sigma_i I + \rho_i Q_i)^{-1} r_i\) keeps the singular vectors of \(r_i\), and takes a
    singular value \(s\) to \(s / (\sigma_i + \rho_i \min(s, \eta_i))\): small ones are treated as
    by gradient descent, large ones as by Muon. \(Q_i\) is positive semidefinite, and with a finite
    `eta` it meets the paper's condition (2.11).

    The state is the dual alone, 4 bytes per parameter in float32, unless `average` is more
    than 0: then \(Q_i = \min(A_i^{1/2}, \eta_i)\) with an exponential average \(A_i\) of
    \(r_i r_i^\top\), or of \(r_i^\top r_i\) if that is smaller. Unlike other state it is not shaped
    like its parameter, so parameters must not be sharded.

    Args:
        eta: \(\eta_i\), cap of the eigenvalues of Q.
        average: decay of the exponential average per round, in [0, 1); 0 for no average.
        aspect_scaling: divide Q by \(\sqrt{\max(1, \mathrm{rows}/\mathrm{cols})}\), so that large
            singular values become that much more than \(1/\rho_i\), as in `NewtonSchulz`.
        match_rms: divide Q by \(0.2 \sqrt{\max(\mathrm{rows}, \mathrm{cols})}\) instead, and by
            \(\sqrt n\) for a vector of n entries: where singular values are large, the entries of a
            step have the root mean square \(0.2/\rho_i\), those of vectors \(1/\rho_i\), whatever
            the shape, as in `torchpisa.MISA` with \(1/\rho_i\) for its learning rate.
        method: computation of the form without average: `"svd"`, as defined; `"gram"`, an
            eigendecomposition in float64; `"polar"`, products and one Cholesky decomposition in
            float32, without waiting for the device; `"auto"` is `"svd"` for float64, else
            `"gram"` on CPUs and `"polar"` elsewhere. Averages take an eigendecomposition in float64
            anywhere. `"smooth"` is for another Q, that of
            \((r_i r_i^\top + \tau^2 I)^{1/2} - \tau I\) with \(\tau = \sigma_i/\rho_i\), by a few
            Newton-Schulz steps: as cheap and as rough as in Muon, and without `eta`.
        ns_steps: Newton-Schulz iterations of `"smooth"`.
        dtype: dtype of those iterations; by default that of the state.
    """

    homogeneous: ClassVar[bool] = True

    eta: float = math.inf
    average: float = 0.0
    aspect_scaling: bool = False
    match_rms: bool = False
    method: Method = "auto"
    ns_steps: int = 5
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_range("eta", self.eta, 0, low_open=True)
        check_range("average", self.average, 0, 1, high_open=True)
        check_choice("aspect_scaling", self.aspect_scaling, (True, False))
        check_choice("match_rms", self.match_rms, (True, False))
        if self.aspect_scaling and self.match_rms:
            raise ValueError("aspect_scaling must be False with match_rms, got True for both")
        check_choice("method", self.method, ("auto", "svd", "gram", "polar", "smooth"))
        check_count("ns_steps", self.ns_steps, high=100)  # many more than any matrix needs
        if self.method == "smooth" and (self.eta < math.inf or self.average):
            raise ValueError(
                "method must not be 'smooth' with a finite eta or an average, got "
                f"eta={self.eta!r}, average={self.average!r}"
            )

    def check(self, params: Sequence[Tensor]) -> None:
        for param in params:
            if param.dim() < 2 or param.is_complex() or not param.numel():
                raise ValueError(
                    "params must be real matrices for Spectral, got one of shape "
                    f"{tuple(param.shape)} and {param.dtype}"
                )
            self._check_sharding(param)

    def _check_sharding(self, param: Tensor) -> None:
        if self.average and hasattr(param, "full_tensor"):
            raise ValueError(
                f"average must be 0 for sharded parameters, got {self.average!r}: the average of a "
                "matrix is not shaped like it and cannot be sharded with it"
            )

    def init(self, param: Tensor) -> dict[str, Tensor]:
        if not self.average:
            return {}
        self._check_sharding(param)
        n = min(param.size(0), param.numel() // param.size(0))
        return {"average": param.new_zeros(n, n)}

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        r = problem.residual

        def solved(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return self.solve_matrix(
                matrix, state, problem.sigma, problem.rho / self.scale(*matrix.shape), problem.step
            )

        if hasattr(r, "full_tensor"):  # sharded: everybody solves for all of it
            return -_everywhere(r, lambda full: solved(full)[0]), {}
        y, new_state = solved(r.flatten(1))
        return -y.reshape(r.shape), new_state

    def solve_matrix(
        self, r: Tensor, state: State, sigma: Scalar, rho: Scalar, step: Scalar
    ) -> tuple[Tensor, dict[str, Tensor]]:
        r"""Return \((\sigma I + \rho Q)^{-1} r\) of matrices of one shape, and the new state.

        Args:
            r: matrices in the last two dimensions; leading dimensions are a batch.
            state: the state of all of them, stacked.
            sigma: \(\sigma_i\).
            rho: \(\rho_i\), by `scale`.
            step: the number of updates of the state, the current one included.
        """
        if self.average:
            average = spectral.update_average(state["average"], r, self.average)
            y = spectral.averaged(r, average, step, self.average, sigma, rho, self.eta)
            return y, {"average": average}
        if self.method == "smooth":
            return spectral.smoothed(r, sigma, rho, self.ns_steps, self.dtype), {}
        return self._resolvent(r)(r, sigma, rho, self.eta), {}

    def consensus(
        self,
        w: Tensor,
        total: Tensor,
        rho: Scalar,
        total_sigma: Scalar,
        consensus_decay: float = 0.0,
        lr: Scalar = 1.0,
    ) -> Tensor:
        r"""Return the next \(w\), equation (2.9) with a proximal term.

        What is minimised has \(\frac{\rho}{2} \lVert w^{\ell+1} - w^\ell \rVert_P^2\) more, with
        \(P = \min((V V^\top)^{1/2}, \eta)\) of \(V = U - \lambda w\), so that
        \(w + \mathrm{lr}\,((S + \mathrm{lr}\,\lambda) I + \rho P)^{-1} V\) follows. A
        vector counts as a column.

        Args:
            w: \(w^\ell\).
            total: \(U = \sum_i \alpha_i u_i\).
            rho: \(\rho\), the weight of the term.
            total_sigma: \(S = \sum_i \alpha_i \sigma_i\).
            consensus_decay: \(\lambda\).
            lr: relative learning rate, which divides sigma and rho alike.
        """
        pull = total - consensus_decay * w if consensus_decay else total

        def solved(matrix: Tensor) -> Tensor:
            scale = self.scale(*matrix.shape)
            sigma = total_sigma + lr * consensus_decay
            return self.solve_matrix(matrix, {}, sigma, rho / scale, 1)[0]

        if hasattr(pull, "full_tensor"):
            return w + lr * _everywhere(pull, solved)
        return w + lr * solved(as_matrix(pull)).reshape(w.shape)

    def _resolvent(self, r: Tensor) -> Callable[[Tensor, Scalar, Scalar, float], Tensor]:
        method = self.method
        if method == "auto":
            on_cpu = r.device.type == "cpu"
            method = "svd" if r.dtype == torch.float64 else "gram" if on_cpu else "polar"
        ways = {"svd": spectral.by_svd, "gram": spectral.by_gram, "polar": spectral.by_polar}
        return ways[method]

    def scale(self, rows: int, cols: int) -> float:
        """Return what Q of a matrix is divided by."""
        if self.match_rms:
            rms = RMS if min(rows, cols) > 1 else 1.0
            return rms * math.sqrt(max(rows, cols))
        return max(1.0, rows / cols) ** 0.5 if self.aspect_scaling else 1.0


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a tensor as rows of its first dimension; a vector becomes a column."""
    return tensor.flatten(1) if tensor.dim() > 1 else tensor.reshape(-1, 1)


def _everywhere(r: Tensor, solved: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what `solved` makes of a sharded matrix, sharded in the same way."""
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(r, DTensor)
    full = r.full_tensor()
    y = solved(full.flatten(1)).reshape(full.shape)
    mesh = r.device_mesh
    whole = DTensor.from_local(y, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=r.placements)
