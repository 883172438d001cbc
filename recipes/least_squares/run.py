"""One curve: the data, the optimizer, and the objective's distance from its minimum."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import torchpisa
from recipes.least_squares.config import Config, Settings
from recipes.recipe import Line
from torchpisa.data import Parts, split
from torchpisa.penalty import Every
from torchpisa.preconditioners import Hessian

__all__ = ["Problem", "make", "run"]


@dataclass(frozen=True)
class Problem:
    """F(w) = |a w - b|^2 / 2|D|, and the parts that the data is divided into."""

    a: Tensor
    b: Tensor
    parts: Parts
    optimum: Tensor

    def gap(self, w: Tensor) -> float:
        """Return (F(w) - F*) / F*, not as a difference, which would end at the rounding of F."""
        rest = self.a @ self.optimum - self.b
        return float((self.a @ (w - self.optimum)).square().sum() / rest.square().sum())


def make(config: Config) -> Problem:
    """Make a problem: samples a third each normal, Student-t(5), and uniform on [-5, 5]."""
    generator = torch.Generator().manual_seed(config.seed)
    options = {"generator": generator, "dtype": torch.float64}
    span = (config.smallest, config.largest + 1)
    sizes = torch.randint(*span, (config.batches,), generator=generator).tolist()
    total = sum(sizes)
    third = total // 3
    columns = config.features + 1  # the last one is b
    normal = torch.randn(third, columns, **options)
    chi_squared = torch.randn(5, third, columns, **options).square().sum(0)
    student = torch.randn(third, columns, **options) / (chi_squared / 5).sqrt()
    uniform = 10 * torch.rand(total - 2 * third, columns, **options) - 5
    samples = torch.cat([normal, student, uniform])
    a, b = samples[:, :-1], samples[:, -1]
    parts = split(total, batches=config.batches, sizes=sizes, seed=config.seed)  # shuffles
    optimum = torch.linalg.lstsq(a, b.unsqueeze(1)).solution.squeeze(1)
    return Problem(a, b, parts, optimum)


def run(config: Config, settings: Settings) -> Iterator[Line]:
    """Yield the gap after every round, from w = 0. The mini-batch B_i is all of D_i."""
    torch.set_num_threads(1)  # the matrices are too small for more to help
    problem = make(config)
    batches = [(problem.a[part], problem.b[part]) for part in problem.parts.indices]
    w = torch.nn.Parameter(torch.zeros(config.features, dtype=torch.float64))
    common = {
        "sigma": settings.sigma,
        "rho": config.rho,
        "gamma": Every(settings.gamma, settings.k0),
        "batches": config.batches,
        "weights": problem.parts.weights,
    }
    second_order = settings.preconditioner == "hessian"
    hessian = Hessian(solver="dense")
    if second_order:
        opt = torchpisa.PISA([w], hessian, **common)
    else:
        opt = torchpisa.SISA([w], scheme="adam", beta=config.beta, **common)
    yield {"iteration": 0, "gap": problem.gap(w.detach())}
    for iteration in range(1, config.rounds + 1):
        for a, b in batches:
            opt.zero_grad()
            loss = 0.5 * (a @ w - b).square().mean()
            loss.backward(retain_graph=second_order)
            if second_order:
                hessian.observe(loss)
            opt.step()
        yield {"iteration": iteration, "gap": problem.gap(w.detach())}
