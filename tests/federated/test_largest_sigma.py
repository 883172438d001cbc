"""Penalties that have grown as far as they can leave clients and servers with finite numbers."""

import pytest
import torch
from torch import nn

from torchpisa.federated import MISA, PISA, SISA, Epochs, Simulation
from torchpisa.penalty import LARGEST_SIGMA
from torchpisa.preconditioners import Identity, LocalProblem, Preconditioner
from torchpisa.preconditioners.base import State


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 3, generator=generator), torch.arange(24) % 2
    return [(x[y == label], y[y == label]) for label in (0, 1)]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("local", "sigma"),
    [({}, 5.0), ({"local": Epochs(2, batch_size=6)}, 5.0), ({}, 1e38)],
    ids=["one", "several", "at the end"],
)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", ["pisa", "sisa", "misa"])
def test_sigma_grows_to_its_end(kind: str, batched: bool, sigma: float, local: dict) -> None:
    """From 5 by a factor of 1e29 in 40 rounds, or from the start at the end of float32."""
    settings = {"sigma": sigma, "rho": 1.0, "gamma": 0.1, **local}
    algorithms = {
        "pisa": lambda: PISA(preconditioner=Identity(), **settings),
        "sisa": lambda: SISA(**settings),
        "misa": lambda: MISA(**settings),
    }
    simulation = Simulation(model(), clients(), algorithms[kind](), batched=batched)
    simulation.run(40, progress=False)
    server = simulation.server
    assert server.numbers["sigma"] == max(sigma, LARGEST_SIGMA)
    for tensors in (server.weights, *server.memory.values()):
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    # The duals go on learning: they are what the clients' gradients add up to, up to their sign.
    assert all(dual.abs().max() > 1e-4 for dual in server.memory["dual"].values())


class Taken(Preconditioner):
    """Remembers something under a name that clients use themselves."""

    def init(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"moved": torch.zeros_like(param)}

    def solve(
        self, problem: LocalProblem, state: State
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -problem.residual, dict(state)


def test_names_that_are_taken() -> None:
    with pytest.raises(ValueError, match=r"names of Taken\.init .* got 'moved'"):
        Simulation(model(), clients(), PISA(preconditioner=Taken(), sigma=1.0, rho=1.0))
