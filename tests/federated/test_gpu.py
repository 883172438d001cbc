"""On a GPU: recorded rounds and batched clients equal those of the CPU."""

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.federated.problems import (
    MAKERS,
    Pair,
    classes,
    conv,
    distance,
    flat,
    logistic,
    matrices,
    memories,
    mlp,
    parameters,
    simulate,
    works,
)
from torchpisa.federated import (
    PISA,
    SISA,
    Algorithm,
    Epochs,
    FedAvg,
    FullGradient,
    Minibatches,
    Scaffold,
    Simulation,
    accuracy,
)
from torchpisa.penalty import Every
from torchpisa.preconditioners import Hessian, NewtonSchulz

pytestmark = pytest.mark.gpu

every_algorithm = pytest.mark.parametrize("name", MAKERS)
LARGE = (600, 530, 515, 700, 540)  # each fills the device: clients run side by side


def some(iteration: int) -> Sequence[int]:
    return [i for i in range(5) if (iteration + 2 * i) % 3]


def assert_equals_cpu(
    algorithm: Algorithm,
    rounds: int,
    *,
    batched: bool | int | None,
    model: Callable[[], nn.Module] = mlp,
    clients: list[Pair] | None = None,
    tolerance: float = 1e-10,
    **settings: Any,
) -> Simulation:
    """Compare in float64 with sequential clients on the CPU, and return the simulation."""
    expected = simulate(algorithm, rounds, model, clients, batched=False, **settings)
    simulation = simulate(
        algorithm, rounds, model, clients, batched=batched, device="cuda", **settings
    )
    assert all(w.is_cuda for w in simulation.server.weights.values())
    assert all(w.is_cuda for w in simulation.model.parameters())
    assert distance(simulation.server.weights, expected.server.weights) <= tolerance
    assert distance(parameters(simulation.model), parameters(expected.model)) <= tolerance
    for kind, tensors in expected.server.memory.items():
        assert distance(simulation.server.memory[kind], tensors) <= tolerance
    for a, b in zip(memories(simulation), memories(expected), strict=True):
        assert a.keys() == b.keys()
        for kind in a:
            if flat(b[kind]).any():
                assert distance(a[kind], b[kind]) <= 10 * tolerance
            else:
                assert not flat(a[kind]).any()
    assert simulation.counts == expected.counts
    assert distance(expected.server.weights, parameters(model())) > 1e-3
    return simulation


@every_algorithm
@pytest.mark.parametrize("local", works(), ids=repr)
@pytest.mark.parametrize("batched", [True, 2])
def test_at_once(name: str, local: Any, batched: bool | int) -> None:
    """Groups of different members replay what was recorded for others."""
    assert_equals_cpu(MAKERS[name](local=local), 5, batched=batched, participation=some)


@every_algorithm
def test_in_turn(name: str) -> None:
    local = Epochs(0.7, batch_size=5, chunk=3)
    assert_equals_cpu(MAKERS[name](local=local), 5, batched=False, participation=some)


@every_algorithm
@pytest.mark.parametrize("batched", [False, True])
def test_convolutions(name: str, batched: bool) -> None:
    clients = classes((5, 9, 2), (1, 6, 6))
    algorithm = MAKERS[name](local=Epochs(1, batch_size=4, chunk=6))
    assert_equals_cpu(
        algorithm, 4, batched=batched, model=conv, clients=clients, participation=0.67
    )


@pytest.mark.parametrize("batched", [False, True])
def test_newton_schulz(batched: bool) -> None:
    """A power of a number by a counter on the device, and products of matrices."""
    algorithm = PISA(preconditioner=NewtonSchulz(momentum=0.8), sigma=4.0, rho=2.0)
    assert_equals_cpu(
        algorithm, 4, batched=batched, model=matrices, participation=some, tolerance=1e-9
    )


def test_second_order() -> None:
    algorithm = PISA(preconditioner=Hessian(solver="dense"), sigma=1.0, rho=1.0)
    simulation = assert_equals_cpu(algorithm, 6, batched=None, model=logistic, participation=some)
    assert simulation.why_in_turn is not None


# Clients one after the other


def large(shape: tuple[int, ...] = (4,), sizes: Sequence[int] = LARGE) -> list[Pair]:
    return classes(sizes, shape)


@every_algorithm
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("chunk", [100, 8192])
def test_whole_gradients(name: str, steps: int, chunk: int) -> None:
    algorithm = MAKERS[name](local=FullGradient(steps=steps, chunk=chunk))
    simulation = assert_equals_cpu(algorithm, 5, batched=True, clients=large(), participation=some)
    assert simulation._clients._full_gradients is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("batched", [True, 2])
def test_whole_gradients_of_convolutions_in_groups(batched: bool | int) -> None:
    simulation = assert_equals_cpu(
        SISA(sigma=4.0, gamma=0.9, local=FullGradient(chunk=256)),
        5,
        batched=batched,
        model=conv,
        clients=large((1, 6, 6)),
        participation=0.6,
    )
    assert simulation._clients._full_gradients is not None  # type: ignore[union-attr]


def test_whole_gradients_where_everybody_takes_part_again_and_again() -> None:
    """More rounds than are recorded: weights that a graph had baked in would stand still."""
    assert_equals_cpu(SISA(sigma=4.0), 12, batched=True, clients=large())


def test_clients_that_come_late() -> None:
    """Clients absent from the first rounds are recorded when they come."""

    def late(iteration: int) -> Sequence[int]:
        return [0, 2] if iteration < 3 else [] if iteration == 3 else range(5)

    assert_equals_cpu(SISA(sigma=4.0), 7, batched=True, clients=large(), participation=late)


def test_small_clients_and_minibatches_are_stacked() -> None:
    for algorithm, clients in (
        (SISA(), classes()),
        (SISA(local=Minibatches(2, 8)), large()),
        (FedAvg(lr=0.1), large()),
    ):
        simulation = simulate(algorithm, 0, clients=clients, device="cuda")
        assert simulation._clients._full_gradients is None  # type: ignore[union-attr]


# What is recorded


NUMBERS: dict[str, Algorithm] = {
    "gamma": SISA(sigma=2.0, rho=1.0, gamma=0.7),
    "gamma every": SISA(sigma=2.0, rho=1.0, gamma=Every(0.5, 3)),
    "gamma, steps": SISA(sigma=3.0, rho=1.0, gamma=0.8, local=FullGradient(steps=3)),
    "lr": FedAvg(lr=0.3, lr_decay=0.6, momentum=0.5, local=FullGradient(steps=2)),
    "lr of Scaffold": Scaffold(lr=0.2, lr_decay=0.6, local=FullGradient(steps=2)),
}


@pytest.mark.parametrize("clients", [classes(), large()], ids=["stacked", "whole"])
@pytest.mark.parametrize("algorithm", NUMBERS.values(), ids=NUMBERS)
def test_graphs_do_not_bake_numbers_in(algorithm: Algorithm, clients: list[Pair]) -> None:
    """sigma and lr differ in every round, and the counters of the second moment too."""
    simulation = assert_equals_cpu(algorithm, 8, batched=True, clients=clients)

    def recorded() -> int:
        replays = simulation._clients._vmapped.values()  # type: ignore[union-attr]
        return sum(len(getattr(replay, "_graphs", ())) for replay in replays)

    before = recorded()
    assert before > 0
    simulation.round()
    assert recorded() == before, "nothing new is to be recorded while shapes stay"


@pytest.mark.parametrize("local", [Minibatches(2, 5), Epochs(0.7, batch_size=5)])
def test_graphs_do_not_bake_samples_in(local: Any) -> None:
    assert_equals_cpu(FedAvg(lr=0.2, local=local), 8, batched=True)


def test_two_simulations_at_a_time() -> None:
    """Their recordings share nothing."""
    algorithms = SISA(sigma=4.0), Scaffold(lr=0.1, local=FullGradient(steps=2))
    simulations = [simulate(a, 0, clients=large(), device="cuda", batched=True) for a in algorithms]
    for _ in range(5):
        for simulation in simulations:
            simulation.round()
    for algorithm, simulation in zip(algorithms, simulations, strict=True):
        expected = simulate(algorithm, 5, clients=large(), batched=False)
        assert distance(simulation.server.weights, expected.server.weights) <= 1e-10


# Data and models that are elsewhere


@pytest.mark.parametrize("batched", [False, True])
def test_data_and_model_on_the_gpu_already(batched: bool) -> None:
    clients = [(x.cuda(), y.cuda()) for x, y in classes()]
    algorithm = SISA(sigma=4.0, local=Epochs(1, batch_size=4))
    here = simulate(algorithm, 4, lambda: mlp().cuda(), clients, batched=batched)
    there = simulate(algorithm, 4, batched=batched)
    assert all(w.is_cuda for w in here.server.weights.values())
    assert distance(here.server.weights, there.server.weights) <= 1e-10


def test_accuracy_follows_the_model() -> None:
    x, y = classes()[3]
    cpu, gpu = accuracy(x, y, chunk=7)(mlp()), accuracy(x, y, chunk=7)(mlp().cuda())
    assert gpu["accuracy"] == cpu["accuracy"]
    assert gpu["loss"] == pytest.approx(cpu["loss"], rel=1e-6)


# Resuming


@pytest.mark.parametrize("clients", [classes(), large()], ids=["small", "large"])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["SISA", "Scaffold", "FedNova"])
def test_resume(name: str, batched: bool, clients: list[Pair], tmp_path: Path) -> None:
    """The first process records its graphs at other numbers than the second."""
    algorithm = MAKERS[name](local=FullGradient(steps=2))

    def make() -> Simulation:
        return simulate(
            algorithm, 0, clients=clients, participation=some, batched=batched, device="cuda"
        )

    whole = make()
    whole.run(7, progress=False)
    checkpoint = tmp_path / "run.pt"
    make().run(4, checkpoint=checkpoint, progress=False)
    resumed = make()
    rows = resumed.run(7, checkpoint=checkpoint, progress=False)
    assert [row["round"] for row in rows] == list(range(8))
    assert all(w.is_cuda for w in resumed.server.weights.values())
    assert distance(resumed.server.weights, whole.server.weights) <= 1e-13
    for a, b in zip(memories(resumed), memories(whole), strict=True):
        assert all(distance(a[kind], b[kind]) <= 1e-11 for kind in a)
    assert resumed.counts == whole.counts


def test_resume_after_rounds_of_its_own() -> None:
    """Loading replaces the memory that recorded graphs have already seen."""
    algorithm = SISA(sigma=4.0, gamma=0.9, local=FullGradient(steps=2))
    first = simulate(algorithm, 3, batched=True, device="cuda")
    state = first.state_dict()
    other = simulate(algorithm, 5, batched=True, device="cuda", participation=some)
    other._participation = 1.0
    other.load_state_dict(state)
    for _ in range(3):
        other.round()
    expected = simulate(algorithm, 6, batched=False)
    assert distance(other.server.weights, expected.server.weights) <= 1e-10


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_moves_to_another_device(
    devices: tuple[str, str], batched: bool, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run.pt"
    algorithm = SISA(sigma=4.0, gamma=0.9, local=FullGradient(steps=2))
    for rounds, device in zip((3, 6), devices, strict=True):
        run = simulate(algorithm, 0, batched=batched, device=device)
        run.run(rounds, checkpoint=checkpoint, progress=False)
    assert next(iter(run.server.weights.values())).device.type == devices[1]
    expected = simulate(algorithm, 6, batched=False)
    assert distance(run.server.weights, expected.server.weights) <= 1e-10


def test_rounds_do_not_collect_memory() -> None:
    simulation = simulate(SISA(sigma=4.0), 4, clients=large(), device="cuda")
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        simulation.round()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
