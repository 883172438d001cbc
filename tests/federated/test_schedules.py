"""Schedules: their values, their errors, and what a schedule does to an algorithm."""

import re

import pytest

from tests.federated.problems import distance, half_square, least_squares, optimum, simulate
from tests.federated.problems import straight as model
from torchpisa.federated import MISA, SISA, FedAdam, FedAvg, LinearDecay, Minibatches
from torchpisa.federated.schedules import factor


def test_linear_decay_ends_with_the_rounds() -> None:
    assert [LinearDecay(5)(i) for i in range(6)] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2, 0.2])
    held = [LinearDecay(4, hold=0.5)(i) for i in range(4)]
    assert held == pytest.approx([1, 1, 1, 0.5])


def test_a_number_is_a_power_and_a_function_the_factor_itself() -> None:
    assert factor("lr_decay", 0.9, 3) == pytest.approx(0.9**3)
    assert factor("lr_decay", lambda iteration: 0.5 + iteration, 3) == 3.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be"),
        ({"rounds": 2.5}, "rounds must be"),
        ({"rounds": 3, "hold": 1.0}, "hold must be in [0, 1), got 1.0"),
    ],
)
def test_arguments_of_linear_decay(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        LinearDecay(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (SISA(lr=lambda iteration: -1.0), "lr"),
        (FedAvg(lr=0.1, lr_decay=lambda iteration: -1.0), "lr_decay"),
        (FedAdam(lr=0.1, server_lr_decay=lambda iteration: -1.0), "server_lr_decay"),
    ],
)
def test_what_a_function_returns_is_checked(algorithm: object, name: str) -> None:
    simulation = simulate(algorithm, 0)  # type: ignore[arg-type]
    message = re.escape(f"{name} must be a finite number >= 0, got -1.0")
    with pytest.raises(ValueError, match=message):
        simulation.round()


@pytest.mark.parametrize("make", [SISA, MISA])
def test_decay_averages_the_noise_of_mini_batches_out(make: type) -> None:
    """At a constant rate, the weights end as far away as the noise takes them."""
    clients = least_squares()

    def error(**options: object) -> float:
        algorithm = make(sigma=2.0, rho=0.5, local=Minibatches(1, batch_size=2), **options)
        simulation = simulate(algorithm, 300, model, clients, loss=half_square)
        return distance(simulation.server.weights, {"weight": optimum(clients)})

    assert error(lr=LinearDecay(300)) < 0.4 * error()
