r"""Q = the Hessian of the batch, or its Gauss-Newton part; equation (4.1)."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.preconditioners.base import LocalProblem, Preconditioner, State

__all__ = ["Hessian", "conjugate_gradients"]

Product = Callable[[Tensor], Tensor]


class Hessian(Preconditioner):
    r"""\(Q_i\) is the curvature of the batch's own loss, over all parameters of a group together.

    Small problems are solved exactly: the matrix is formed, its eigenvalues are projected to
    \([0, \eta_i]\) and equation (2.13) is evaluated. Networks are solved matrix-free, by conjugate
    gradients on products with the curvature.

    The curvature needs the loss with its graph, not only the gradient. Pass it to `observe` before
    each step:

        hessian = Hessian()
        opt = PISA(model.parameters(), hessian, sigma=1.0, rho=1.0)
        outputs = model(x)
        loss = loss_fn(outputs, y)
        loss.backward(retain_graph=True)
        hessian.observe(loss, outputs)
        opt.step()

    Args:
        curvature: `"hessian"`, or `"gauss_newton"`: \(J^\top H J\) with the Jacobian of the outputs
            and the Hessian of the loss in the outputs, positive semidefinite for convex losses.
        solver: `"dense"`, `"cg"`, or `"auto"`: dense up to `dense_limit` parameters.
        eta: \(\eta_i\), upper bound of the projection; dense only.
        tol: relative residual at which conjugate gradients stop.
        max_iter: largest number of iterations of conjugate gradients, which also stop at a
            direction of negative curvature.
        probes: random vectors that estimate the diagonal by which conjugate gradients are
            preconditioned (Hutchinson); 0 for none. They change the path, not the solution.
        dense_limit: see `solver`.
    """

    joint: ClassVar[bool] = True
    homogeneous: ClassVar[bool] = True

    def __init__(
        self,
        curvature: Literal["hessian", "gauss_newton"] = "hessian",
        solver: Literal["auto", "dense", "cg"] = "auto",
        *,
        eta: float = math.inf,
        tol: float = 1e-5,
        max_iter: int = 50,
        probes: int = 4,
        dense_limit: int = 1024,
    ) -> None:
        check_choice("curvature", curvature, ("hessian", "gauss_newton"))
        check_choice("solver", solver, ("auto", "dense", "cg"))
        check_range("eta", eta, 0, low_open=True)
        if eta < math.inf and solver != "dense":
            raise ValueError(f"eta must be inf unless solver is 'dense', got {eta!r}")
        check_range("tol", tol, 0, low_open=True, high_open=True)
        check_count("max_iter", max_iter)
        check_count("probes", probes, 0)
        check_count("dense_limit", dense_limit, 0)
        self.curvature = curvature
        self.solver = solver
        self.eta = eta
        self.tol = tol
        self.max_iter = max_iter
        self.probes = probes
        self.dense_limit = dense_limit
        self._loss: Tensor | None = None
        self._outputs: Tensor | None = None
        self._solved: set[int] = set()

    def observe(self, loss: Tensor, outputs: Tensor | None = None) -> None:
        """Take the loss of the batch about to be stepped; `outputs` too for Gauss-Newton."""
        if not loss.requires_grad:
            raise ValueError("loss must be differentiable, got a tensor without a graph")
        if self.curvature == "gauss_newton" and outputs is None:
            raise ValueError("outputs must be given for curvature='gauss_newton', got None")
        self._loss, self._outputs = loss, outputs
        self._solved.clear()

    def check(self, params: Sequence[Tensor]) -> None:
        if self._loss is None or any(id(param) in self._solved for param in params):
            raise RuntimeError(
                "Hessian has no loss for this batch: keep the graph (loss.backward("
                "retain_graph=True)) and call observe(loss, outputs) before every step()"
            )
        if any(param.is_complex() for param in params):
            raise ValueError("params must be real for Hessian, got a complex parameter")

    def __getstate__(self) -> dict[str, object]:
        # A graph cannot be copied or pickled, and is of no use to later batches.
        return {**self.__dict__, "_loss": None, "_outputs": None, "_solved": set()}

    def solve(self, problem: LocalProblem, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        return self.solve_all([problem], [state])[0]

    def solve_all(
        self, problems: Sequence[LocalProblem], states: Sequence[State]
    ) -> list[tuple[Tensor, dict[str, Tensor]]]:
        params = [problem.param for problem in problems]
        r = _flat([problem.residual for problem in problems])
        decay = _flat(
            [torch.full_like(problem.residual, problem.weight_decay) for problem in problems]
        )
        sigma, rho = problems[0].sigma, problems[0].rho
        if problems[0].present:
            curvature = self._product(params, r.dtype)
            d = self._solve(lambda v: curvature(v) + decay * v, -r, float(sigma), float(rho))
            self._solved.update(id(param) for param in params)
        else:
            d = -r / (sigma + rho * decay.clamp(max=self.eta))
        sizes = [problem.residual.numel() for problem in problems]
        pieces = torch.split(d, sizes)
        return [
            (piece.view_as(problem.residual), {})
            for piece, problem in zip(pieces, problems, strict=True)
        ]

    def _solve(self, curvature: Product, b: Tensor, sigma: float, rho: float) -> Tensor:
        n = b.numel()
        if self.solver == "dense" or (self.solver == "auto" and n <= self.dense_limit):
            q = torch.vmap(curvature)(torch.eye(n, dtype=b.dtype, device=b.device))
            values, vectors = torch.linalg.eigh((q + q.mT) / 2)
            solution: Tensor = vectors @ (
                (vectors.mT @ b) / (sigma + rho * values.clamp(0, self.eta))
            )
            return solution
        diagonal = sigma + rho * self._diagonal(curvature, b)
        return conjugate_gradients(
            lambda v: sigma * v + rho * curvature(v),
            b,
            diagonal,
            tol=self.tol,
            max_iter=self.max_iter,
        )

    def _diagonal(self, curvature: Product, like: Tensor) -> Tensor:
        total = torch.zeros_like(like)
        generator = torch.Generator(like.device).manual_seed(0)
        for _ in range(self.probes):
            z = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
            sign = (2 * z - 1).to(like.dtype)
            total += sign * curvature(sign)
        return total.abs() / max(1, self.probes)

    def _product(self, params: list[Tensor], dtype: torch.dtype) -> Product:
        """Return v -> Q v on flat vectors, at the observed loss."""
        loss, outputs = self._loss, self._outputs
        assert loss is not None
        if self.curvature == "hessian":
            with torch.enable_grad():
                gradient = _gradient(loss, params, create_graph=True)

            def hessian(v: Tensor) -> Tensor:
                return _gradient(gradient, params, v.to(gradient.dtype)).to(dtype)

            return hessian
        assert outputs is not None
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
            # J v as the derivative in u of the linear map u -> J^T u.
            u = torch.zeros_like(outputs, requires_grad=True)
            transposed = _gradient(outputs, params, u, create_graph=True)

        def gauss_newton(v: Tensor) -> Tensor:
            (jv,) = torch.autograd.grad(
                transposed, u, v.to(transposed.dtype), retain_graph=True, materialize_grads=True
            )
            hjv = torch.zeros_like(jv)
            if slope.requires_grad:
                (hjv,) = torch.autograd.grad(
                    slope, outputs, jv, retain_graph=True, materialize_grads=True
                )
            return _gradient(outputs, params, hjv).to(dtype)

        return gauss_newton


def conjugate_gradients(
    product: Product, b: Tensor, diagonal: Tensor, *, tol: float, max_iter: int
) -> Tensor:
    """Solve A x = b from x = 0 for a symmetric A given by its products.

    Args:
        product: v -> A v.
        b: right-hand side.
        diagonal: positive Jacobi preconditioner.
        tol: stop when |b - A x| <= tol |b|.
        max_iter: iteration cap.

    Returns:
        x, or the last x before a direction p with p^T A p <= 0; if the first direction is one,
        b / diagonal.
    """
    x = torch.zeros_like(b)
    residual = b.clone()
    z = residual / diagonal
    p = z
    rz = residual @ z
    stop = tol * b.norm()
    for iteration in range(max_iter):
        if residual.norm() <= stop:
            break
        ap = product(p)
        curvature = p @ ap
        if curvature <= 0:
            return x if iteration else b / diagonal
        alpha = rz / curvature
        x = x + alpha * p
        residual = residual - alpha * ap
        z = residual / diagonal
        rz, previous = residual @ z, rz
        p = z + (rz / previous) * p
    return x


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _gradient(
    of: Tensor, params: list[Tensor], grad_outputs: Tensor | None = None, create_graph: bool = False
) -> Tensor:
    """Return the flat gradient of `of` in `params`; parameters it does not depend on have zero."""
    if not of.requires_grad:
        return _flat([torch.zeros_like(param) for param in params])
    return _flat(
        torch.autograd.grad(
            of,
            params,
            grad_outputs,
            retain_graph=True,
            create_graph=create_graph,
            materialize_grads=True,
        )
    )
