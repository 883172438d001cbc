"""A simulation: clients at once and in turn, what a run costs, and runs that are interrupted."""

import copy
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchpisa
from tests.federated.problems import (
    MAKERS,
    SIZES,
    Pair,
    classes,
    conv,
    distance,
    flat,
    half_square,
    least_squares,
    logistic,
    memories,
    mlp,
    parameters,
    seeded,
    simulate,
    straight,
    works,
)
from torchpisa.federated import (
    PISA,
    SISA,
    Epochs,
    FedAvg,
    FullGradient,
    Minibatches,
    Simulation,
    Timing,
    accuracy,
    cross_entropy,
)
from torchpisa.preconditioners import Hessian

every_algorithm = pytest.mark.parametrize("name", MAKERS)
both_ways = pytest.mark.parametrize("batched", [False, True], ids=["in turn", "at once"])


def some(iteration: int) -> Sequence[int]:
    return [i for i in range(5) if (iteration + 2 * i) % 3]


# Clients at once and in turn


def assert_equal_runs(runs: Sequence[Simulation], tolerance: float = 1e-10) -> None:
    first, *others = runs
    for other in others:
        assert distance(other.server.weights, first.server.weights) <= tolerance
        for kind, tensors in first.server.memory.items():
            assert distance(other.server.memory[kind], tensors) <= tolerance
        assert other.counts == first.counts
        for a, b in zip(memories(other), memories(first), strict=True):
            assert a.keys() == b.keys()
            for kind in a:
                assert distance(a[kind], b[kind]) <= tolerance


# Every kind of work with an algorithm that counts steps and with one that does not, and every
# algorithm with work of which clients take different numbers of steps, some in several chunks.
UNEVEN = works()[3]
PAIRS = [
    *((name, local) for local in works() for name in ("SISA", "Scaffold")),
    *((name, UNEVEN) for name in MAKERS if name not in ("SISA", "Scaffold")),
]


@pytest.mark.parametrize(("name", "local"), PAIRS, ids=repr)
def test_at_once_in_groups_and_in_turn(name: str, local: Any) -> None:
    algorithm = MAKERS[name](local=local)
    runs = [
        simulate(algorithm, 4, participation=some, batched=batched) for batched in (False, True, 2)
    ]
    assert [run.batched for run in runs] == [1, 5, 2]
    assert [type(run._clients).__name__ for run in runs] == [
        "SequentialClients",
        "BatchedClients",
        "BatchedClients",
    ]
    assert_equal_runs(runs)
    assert distance(runs[0].server.weights, parameters(mlp())) > 1e-3


@pytest.mark.parametrize("name", ["SISA", "MISA", "Scaffold"])
def test_convolutions_at_once(name: str) -> None:
    clients = classes((5, 9, 2), (1, 6, 6))
    algorithm = MAKERS[name](local=Epochs(1, batch_size=4, chunk=6))
    runs = [
        simulate(algorithm, 3, conv, clients, participation=0.67, batched=batched)
        for batched in (False, True, 2)
    ]
    assert_equal_runs(runs)


@pytest.mark.parametrize("local", [FullGradient(steps=2), Minibatches(steps=2, batch_size=5)])
def test_memory_of_those_present_only(local: Any) -> None:
    """The first group must not write to the memory of the next, nor of the absent."""
    algorithm = SISA(local=local)
    simulation = simulate(algorithm, 3, participation=lambda k: [1, 3, 4], batched=2)
    kept = memories(simulation)
    for i in (0, 2):
        assert not flat(kept[i]["dual"]).any()
        assert kept[i]["step"]["step"] == 0
    for i in (1, 3, 4):
        assert flat(kept[i]["dual"]).all()
        assert kept[i]["step"]["step"] == 3 * 2


@both_ways
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_change_nothing_but_rounding(chunk: int, batched: bool) -> None:
    for make in (FullGradient, Epochs):
        small, large = (SISA(local=make(2, chunk=size)) for size in (chunk, 8192))
        runs = [simulate(algorithm, 3, batched=batched) for algorithm in (small, large)]
        assert_equal_runs(runs, 1e-12)


def test_no_more_than_a_chunk_is_in_memory() -> None:
    seen: list[int] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return super().forward(x)

    for batched, allowed in ((False, 6), (True, 6 // 5)):
        seen.clear()
        model = Watched(4, 3).double()
        algorithm = SISA(local=FullGradient(chunk=6))
        simulation = Simulation(model, classes(), algorithm, batched=batched)
        seen.clear()
        simulation.round()
        assert max(seen) == allowed


def test_one_at_a_time_is_a_number_too() -> None:
    """1 == True in Python, but not here."""
    simulation = simulate(SISA(), 0, batched=1)
    assert simulation.batched == 1
    assert simulate(SISA(), 0, batched=True).batched == 5
    assert simulate(SISA(), 0, batched=99).batched == 5
    assert simulate(SISA(), 0).batched == 5


# Counts


@both_ways
@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("SISA", FullGradient(steps=2)),
        ("SISA", Minibatches(2, batch_size=10)),
        *((name, Epochs(0.7, batch_size=5)) for name in MAKERS),
    ],
)
def test_counts(name: str, local: Any, batched: bool) -> None:
    simulation = simulate(MAKERS[name](local=local), 4, participation=some, batched=batched)
    plans = [local.plan(SIZES[i], (0, str(i)), k) for k in range(4) for i in some(k)]
    weights = 8 * (4 * 5 + 5 + 5 * 3 + 3)
    # They send control variates or movements, too.
    twice = ("Scaffold", "ScaffoldWarm", "FedMuon", "LocalMISA")
    traffic = len(plans) * weights * (2 if name in twice else 1)
    scalars = 2 * 8 * len(plans) if name == "AdaptiveFedADMM" else 0
    counts = simulation.counts
    assert counts.gradients == sum(len(plan) for plan in plans)
    assert counts.samples == sum(len(index) for plan in plans for index in plan)
    assert counts.bytes_up == traffic + scalars
    assert counts.bytes_down == traffic


# Who takes part, and seeds


@pytest.mark.parametrize(("share", "count"), [(1.0, 5), (0.4, 2), (0.5, 2), (0.01, 1)])
def test_share_of_the_clients(share: float, count: int) -> None:
    simulation = simulate(SISA(), 0, participation=share)
    rounds = [simulation.present(k) for k in range(60)]
    assert all(len(set(chosen)) == count and chosen == sorted(chosen) for chosen in rounds)
    assert {i for chosen in rounds for i in chosen} == set(range(5))
    again = simulate(SISA(), 0, participation=share)
    assert [again.present(k) for k in reversed(range(60))] == rounds[::-1]


@both_ways
def test_seeds(batched: bool) -> None:
    """One seed, one run, whatever was drawn before; another seed, another run."""
    algorithm = FedAvg(lr=0.1, local=Epochs(1, batch_size=4))
    ends = []
    for seed in (0, 0, 1):
        torch.rand(1)
        run = simulate(algorithm, 3, seed=seed, participation=0.6, batched=batched)
        ends.append(run.server.weights)
    assert torch.equal(flat(ends[0]), flat(ends[1]))
    assert distance(ends[2], ends[0]) > 1e-4
    presence = [simulate(algorithm, 0, seed=seed, participation=0.4) for seed in (0, 1)]
    assert [presence[0].present(k) for k in range(9)] != [presence[1].present(k) for k in range(9)]


def test_clients_named_twice_count_once() -> None:
    twice = simulate(SISA(), 2, participation=lambda k: [3, 1, 3])
    once = simulate(SISA(), 2, participation=lambda k: [1, 3])
    assert twice.counts == once.counts
    assert torch.equal(flat(twice.server.weights), flat(once.server.weights))


@pytest.mark.parametrize("chosen", [[5], [-1], [0, 7]])
def test_clients_that_do_not_exist(chosen: list[int]) -> None:
    simulation = simulate(SISA(), 0, participation=lambda k: chosen)
    message = f"participation must return clients from 0 to 4, got {chosen}"
    with pytest.raises(ValueError, match=re.escape(message)):
        simulation.round()


@pytest.mark.parametrize(
    "drawn", [np.array([1, 3]), torch.tensor([1, 3]), (3, 1)], ids=["numpy", "torch", "tuple"]
)
def test_numbers_of_clients_may_be_of_any_kind(drawn: Any) -> None:
    run = simulate(SISA(), 3, participation=lambda k: drawn)
    plain = simulate(SISA(), 3, participation=lambda k: [1, 3])
    assert torch.equal(flat(run.server.weights), flat(plain.server.weights))
    assert torch.equal(flat(run.memory_of(1)["dual"]), flat(plain.memory_of(1)["dual"]))


@pytest.mark.parametrize("drawn", [None, 0.5, [0.0, 1.0], ["a"], [True, False], torch.rand(5) > 0])
def test_participation_that_returns_something_else(drawn: Any) -> None:
    simulation = simulate(SISA(), 0, participation=lambda k: drawn)
    message = f"participation must return the numbers of clients, got {drawn!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        simulation.round()


@both_ways
@every_algorithm
def test_the_model_and_the_data_are_not_modified(name: str, batched: bool) -> None:
    model, clients = mlp(), classes()
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(clients)
    algorithm = MAKERS[name](local=Epochs(1, batch_size=4))
    simulation = Simulation(model, clients, algorithm, batched=batched)
    simulation.run(2, progress=False)
    assert all(torch.equal(before[0][key], value) for key, value in model.state_dict().items())
    for (x, y), (old_x, old_y) in zip(clients, before[1], strict=True):
        assert torch.equal(x, old_x)
        assert torch.equal(y, old_y)
    assert simulation.model is not model
    assert distance(parameters(simulation.model), simulation.server.weights) == 0
    assert distance(parameters(simulation.model), parameters(model)) > 1e-3
    assert all(p.grad is None for p in simulation.model.parameters())


@both_ways
@pytest.mark.parametrize("name", ["SISA", "FedAvg"])
def test_frozen_parameters_stay(name: str, batched: bool) -> None:
    """As in any loop of training: an optimizer leaves them alone."""

    def frozen() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        return model

    simulation = simulate(MAKERS[name](), 2, frozen, batched=batched)
    assert torch.equal(simulation.model[0].weight, mlp()[0].weight)  # type: ignore[index]
    assert not torch.equal(simulation.server.weights["0.bias"], parameters(mlp())["0.bias"])


@both_ways
def test_tied_weights_stay_tied(batched: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    torch.manual_seed(0)
    model = Tied().double()
    x, y = classes()[3]
    simulation = Simulation(model, [(x, y)], FedAvg(lr=0.1, local=FullGradient()), batched=batched)
    for _ in range(3):
        simulation.round()
    for _ in range(3):
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            assert model.a.weight.grad is not None
            model.a.weight -= 0.1 * model.a.weight.grad
    assert simulation.model.a.weight is simulation.model.b.weight
    assert distance(parameters(simulation.model), parameters(model)) <= 1e-12


@both_ways
def test_a_parameter_without_influence_stays(batched: bool) -> None:
    class Spare(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.spare = nn.Parameter(torch.ones(2))

    simulation = simulate(SISA(), 2, lambda: Spare().double(), batched=batched)
    assert torch.equal(simulation.server.weights["spare"], torch.ones(2, dtype=torch.float64))
    assert flat(simulation.server.weights).isfinite().all()


# Runs


def test_rows_and_log(tmp_path: Path) -> None:
    measured: list[Tensor] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        measured.append(flat(parameters(model)))
        return {"norm": float(measured[-1].norm())}

    log = tmp_path / "deep" / "log.jsonl"
    simulation = simulate(SISA(), 0)
    rows = simulation.run(8, evaluate=evaluate, every=3, log=log, progress=False)
    assert [row["round"] for row in rows] == [0, 3, 6, 8]
    assert list(rows[0]) == [
        "round",
        "norm",
        "gradients",
        "samples",
        "bytes_up",
        "bytes_down",
        "seconds",
    ]
    assert [row["gradients"] for row in rows] == [0, 15, 30, 40]
    assert [row["samples"] for row in rows] == [k * sum(SIZES) for k in (0, 3, 6, 8)]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert [json.loads(line) for line in log.read_text().splitlines()] == rows
    for k, weights in zip((0, 3, 6, 8), measured, strict=True):
        assert torch.equal(weights, flat(simulate(SISA(), k).server.weights))


def test_run_goes_on_from_where_it_stands() -> None:
    simulation = simulate(SISA(), 0)
    simulation.run(2, progress=False)
    rows = simulation.run(5, progress=False)
    assert simulation.iteration == 5
    assert rows[-1]["round"] == 5
    assert torch.equal(flat(simulation.server.weights), flat(simulate(SISA(), 5).server.weights))
    simulation.run(3, progress=False)
    assert simulation.iteration == 5


def test_a_run_of_no_rounds() -> None:
    assert [row["round"] for row in simulate(SISA(), 0).run(0, progress=False)] == [0]


class InterruptionError(Exception):
    """The process ends in the middle of a run."""


@both_ways
@every_algorithm
def test_an_interrupted_run_is_the_undisturbed_one(
    name: str, batched: bool, tmp_path: Path
) -> None:
    """The interruption falls between two checkpoints, after rows that the log has already."""
    algorithm = MAKERS[name](local=Epochs(0.7, batch_size=4))

    def make(stop: int | None) -> Simulation:
        def participation(k: int) -> Sequence[int]:
            if k == stop:
                raise InterruptionError
            return some(k)

        return simulate(algorithm, 0, participation=participation, batched=batched)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"norm": float(flat(parameters(model)).norm())}

    whole = make(None)
    expected = whole.run(9, evaluate=evaluate, every=2, progress=False)
    files = {"log": tmp_path / "log.jsonl", "checkpoint": tmp_path / "deep" / "run.pt"}
    settings: dict[str, Any] = {"evaluate": evaluate, "every": 2, "progress": False, **files}
    for stop in (5, 7):
        with pytest.raises(InterruptionError):
            make(stop).run(9, **settings)
        with files["log"].open("a") as file:
            file.write('{"round": 99}\n')  # a row whose checkpoint was not reached
    resumed = make(None)
    rows = resumed.run(9, **settings)
    assert torch.equal(flat(resumed.server.weights), flat(whole.server.weights))
    assert torch.equal(flat(parameters(resumed.model)), flat(parameters(whole.model)))
    assert resumed.counts == whole.counts
    assert resumed.server.numbers == whole.server.numbers
    for a, b in zip(memories(resumed), memories(whole), strict=True):
        assert all(torch.equal(t, b[kind][key]) for kind in a for key, t in a[kind].items())
    without = [{key: row[key] for key in row if key != "seconds"} for row in rows]
    assert without == [{key: row[key] for key in row if key != "seconds"} for row in expected]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert [json.loads(line) for line in files["log"].read_text().splitlines()] == rows
    assert [path.name for path in files["checkpoint"].parent.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("name", ["SISA", "Scaffold", "FedAvg"])
def test_a_round_that_was_interrupted_does_no_harm(name: str, tmp_path: Path) -> None:
    """Ctrl-C after two of five clients, whose duals have moved and whose updates are lost."""
    calls, stop = 0, 5 * 3 + 3  # in the third client of the fourth round

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        return half_square(outputs, targets)

    def start() -> Simulation:
        algorithm = MAKERS[name](local=FullGradient())
        return Simulation(straight(), least_squares(), algorithm, loss=loss, batched=False)

    calls = stop
    whole = start()
    whole.run(6, progress=False)
    calls = 0
    run, path = start(), tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        run.run(6, checkpoint=path, progress=False)
    assert run.iteration == 3
    if name == "FedAvg":  # has no memory that could have moved
        run.run(6, progress=False)
        assert torch.equal(flat(run.server.weights), flat(whole.server.weights))
    else:
        for go_on in (run.round, run.state_dict, lambda: run.run(6, progress=False)):
            with pytest.raises(RuntimeError, match="round 4 was interrupted: some clients' memory"):
                go_on()
    run.run(6, checkpoint=path, progress=False)
    assert torch.equal(flat(run.server.weights), flat(whole.server.weights))


def test_a_round_that_was_interrupted_before_anything_changed() -> None:
    """All clients at once, whose duals are still those of the round before."""
    stop = False

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if stop:
            raise KeyboardInterrupt
        return half_square(outputs, targets)

    def simulation() -> Simulation:
        timing = Timing(lambda client, iteration: 1 + client * iteration % 3, deadline=2.5)
        clients = least_squares()
        return Simulation(straight(), clients, SISA(), loss=loss, batched=True, timing=timing)

    run = simulation()
    run.run(3, progress=False)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        run.run(6, progress=False)
    stop = False
    run.run(6, progress=False)
    whole = simulation()
    whole.run(6, progress=False)
    assert torch.equal(flat(run.server.weights), flat(whole.server.weights))
    assert (run.counts, run.time) == (whole.counts, whole.time)


def test_without_a_checkpoint_a_log_begins_anew(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    for _ in range(2):
        rows = simulate(SISA(), 0).run(2, log=log, progress=False)
        assert [json.loads(line) for line in log.read_text().splitlines()] == rows


@both_ways
@pytest.mark.parametrize("name", ["SISA", "Scaffold", "FedAvg"])
def test_state_round_trip(name: str, batched: bool) -> None:
    first = simulate(MAKERS[name](), 3, batched=batched)
    other = simulate(MAKERS[name](), 0, batched=batched)
    other.load_state_dict(first.state_dict())
    assert other.iteration == 3
    assert distance(parameters(other.model), parameters(first.model)) == 0
    for simulation in (first, other):
        for _ in range(2):
            simulation.round()
    assert torch.equal(flat(other.server.weights), flat(first.server.weights))


@both_ways
@pytest.mark.parametrize("name", ["SISA", "Scaffold"])
def test_a_state_belongs_to_its_moment(name: str, batched: bool) -> None:
    """Neither the simulation it came from nor one it was loaded into changes it."""
    first = simulate(MAKERS[name](), 3, batched=batched)
    expected = simulate(MAKERS[name](), 5, batched=batched)
    state = first.state_dict()
    kept = copy.deepcopy(state)
    first.round()
    for saved in (kept, kept, state):
        other = simulate(MAKERS[name](), 0, batched=batched)
        other.load_state_dict(saved)
        for _ in range(2):
            other.round()
        assert torch.equal(flat(other.server.weights), flat(expected.server.weights))


def test_second_order_runs_resume(tmp_path: Path) -> None:
    """With a preconditioner of the same arguments, made again, as a new process makes it."""

    def make() -> Simulation:
        return simulate(PISA(preconditioner=Hessian(), sigma=2.0, rho=1.0), 0, logistic)

    whole = make()
    whole.run(4, progress=False)
    checkpoint = tmp_path / "run.pt"
    make().run(2, checkpoint=checkpoint, progress=False)
    resumed = make()
    resumed.run(4, checkpoint=checkpoint, progress=False)
    assert torch.equal(flat(resumed.server.weights), flat(whole.server.weights))


def test_states_of_another_setting() -> None:
    state = simulate(SISA(), 1, batched=True).state_dict()
    others = {
        "algorithm": simulate(SISA(sigma=6.0), 0, batched=True),
        "sizes": simulate(SISA(), 0, clients=classes((7, 12, 3, 20, 8)), batched=True),
        "seed": simulate(SISA(), 0, seed=1, batched=True),
    }
    for name, other in others.items():
        before = flat(other.server.weights).clone()
        with pytest.raises(ValueError, match=rf"{name} must be that of the saved run, .*, got "):
            other.load_state_dict(state)
        assert other.iteration == 0
        assert torch.equal(flat(other.server.weights), before)


@pytest.mark.parametrize("model", [logistic, lambda: nn.Linear(4, 2).double()])
def test_states_of_another_model(model: Callable[[], nn.Module]) -> None:
    """Of other names or of other shapes: refused before anything is changed."""
    state = simulate(SISA(), 1).state_dict()
    if model is not logistic:
        state = simulate(SISA(), 1, logistic).state_dict()
    clients = [(x, y.clamp(max=1)) for x, y in classes()]
    other = simulate(SISA(), 0, model, clients)
    with pytest.raises(ValueError, match=r"must be that of the saved run|model|weights"):
        other.load_state_dict(state)
    assert other.iteration == 0
    other.round()


def test_groups_may_change_between_runs() -> None:
    """The number of clients that run at once is a matter of memory, not of the result."""
    state = simulate(SISA(), 2, batched=True).state_dict()
    other = simulate(SISA(), 0, batched=2)
    other.load_state_dict(state)
    other.round()
    assert distance(other.server.weights, simulate(SISA(), 3).server.weights) <= 1e-12


@both_ways
def test_divergence(batched: bool, tmp_path: Path) -> None:
    """It is reported, and the checkpoint stays at what was finite."""
    algorithm = FedAvg(lr=1e60, local=FullGradient())
    simulation = simulate(
        algorithm, 0, straight, least_squares(), loss=half_square, batched=batched
    )
    checkpoint = tmp_path / "run.pt"
    with pytest.raises(FloatingPointError, match=r"the weights are not finite after round \d"):
        simulation.run(30, checkpoint=checkpoint, progress=False)
    again = simulate(algorithm, 0, straight, least_squares(), loss=half_square, batched=batched)
    again.load_state_dict(torch.load(checkpoint, weights_only=True)["state"])
    assert flat(again.server.weights).isfinite().all()
    assert again.iteration > 0


# Why clients run one after the other


def refused(model: nn.Module, clients: Sequence[Any], reason: str, algorithm: Any = None) -> None:
    """Check that clients run sequentially for this reason, and that batched=True raises."""
    algorithm = algorithm or SISA()
    simulation = Simulation(model, clients, algorithm)
    assert simulation.why_in_turn is not None
    assert re.search(reason, simulation.why_in_turn)
    assert simulation.batched == 1
    simulation.round()
    assert distance(simulation.server.weights, parameters(model)) > 1e-6
    for batched in (True, 2):
        with pytest.raises(ValueError, match=rf"batched={batched} is not possible: .*{reason}"):
            Simulation(model, clients, algorithm, batched=batched)
    assert Simulation(model, clients, algorithm, batched=False).why_in_turn is None


def test_datasets_run_in_turn() -> None:
    clients = [TensorDataset(x, y) for x, y in classes()]
    refused(mlp(), clients, "the data are not tensors")
    refused(mlp(), [classes()[0], clients[1]], "the data are not tensors")
    algorithm = SISA(local=Epochs(1, batch_size=4))
    runs = [
        simulate(algorithm, 2, clients=data, batched=False)  # type: ignore[arg-type]
        for data in (clients, classes())
    ]
    assert torch.equal(flat(runs[0].server.weights), flat(runs[1].server.weights))


def test_samples_of_different_shapes_run_in_turn() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model = nn.Sequential(model, nn.Linear(8, 3)).double()
    clients = classes((4, 5), (1, 6, 6)) + classes((6,), (1, 8, 8))
    refused(model, clients, "the clients' samples differ in shape or dtype")


def test_targets_of_different_types_run_in_turn() -> None:
    clients = classes((4, 5))
    clients[1] = clients[1][0], F.one_hot(clients[1][1], 3).double()
    refused(mlp(), clients, "the clients' samples differ in shape or dtype")


def test_random_models_run_in_turn() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)).double()
    refused(model, classes(), "the loss of a sample depends on the others or on chance")


@pytest.mark.parametrize("p", [1e-6, 0.05])
def test_models_that_are_rarely_random_run_in_turn(p: float) -> None:
    """One draw may not show it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(p)).double()
    assert Simulation(model, classes(), SISA()).why_in_turn is not None


def normalised(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), layer, nn.Flatten(), nn.Linear(32, 3)).double()


MIXES = "the loss of a sample depends on the others or on chance"


def test_models_that_mix_samples_run_in_turn() -> None:
    model = normalised(nn.BatchNorm2d(2, track_running_stats=False))
    refused(model, classes((5, 9, 3), (1, 6, 6)), MIXES)


def test_models_that_mix_samples_run_in_turn_where_the_first_client_is_small() -> None:
    """One sample twice says nothing about how two mix."""
    model = normalised(nn.BatchNorm2d(2, track_running_stats=False))
    refused(model, classes((1, 9, 3), (1, 6, 6)), MIXES)


def test_models_that_cannot_run_on_one_sample_run_in_turn() -> None:
    """BatchNorm1d refuses a batch of one, which is no reason to refuse the model."""
    layers = (nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3))
    refused(nn.Sequential(*layers).double(), classes((5, 9, 3)), "")


def test_models_that_vmap_cannot_run_run_in_turn() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.weight.abs().sum().item() > 0 and x.sum().item() < 1e9 else 2 * out

    torch.manual_seed(0)
    refused(Branching(4, 3).double(), classes(), r"torch.vmap cannot run the model \(.+\)")


def test_second_order_runs_in_turn() -> None:
    algorithm = PISA(preconditioner=Hessian(), sigma=2.0, rho=1.0)
    reason = "the preconditioner needs the loss of each client"
    refused(logistic(), classes(), reason, algorithm)


def test_group_norm_runs_at_once() -> None:
    model = normalised(nn.GroupNorm(1, 2))
    simulation = Simulation(model, classes((5, 9, 3), (1, 6, 6)), SISA())
    assert simulation.why_in_turn is None
    assert simulation.batched == 3


# Refusals


@pytest.mark.parametrize("batched", [None, False])
def test_running_statistics(batched: bool | None) -> None:
    message = "model must not keep running statistics, got BatchNorm2d at '1': use GroupNorm"
    with pytest.raises(ValueError, match=re.escape(message)):
        Simulation(
            normalised(nn.BatchNorm2d(2)), classes((5, 9), (1, 6, 6)), SISA(), batched=batched
        )


class Buffered(nn.Linear):
    """A layer that keeps something in a buffer."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 3)
        self.kind = kind
        self.register_buffer("kept", torch.ones(1 if kind == "cache" else 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "cache":
            self.kept = torch.ones(4, dtype=x.dtype)
        elif self.kind == "replaced":
            self.kept = 0.9 * self.kept + 0.1 * x.detach().mean(0)
        else:
            self.kept.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.kept)


@pytest.mark.parametrize("batched", [None, True, False])
@pytest.mark.parametrize("kind", ["in place", "replaced"])
def test_statistics_of_other_layers(kind: str, batched: bool | None) -> None:
    with pytest.raises(ValueError, match=r"must not change its buffers, as .* with 'kept'"):
        simulate(SISA(), 1, lambda: seeded(lambda: Buffered(kind)), batched=batched)


@pytest.mark.parametrize("batched", [None, False])
def test_a_cache_is_no_statistic(batched: bool | None) -> None:
    assert simulate(SISA(), 2, lambda: seeded(lambda: Buffered("cache")), batched=batched)


@pytest.mark.parametrize("batched", [None, True, False])
def test_loss_that_returns_a_mean(batched: bool | None) -> None:
    expected = r"loss must return one number per sample, shape \(\d+,\), got \(\): .*reduction"
    with pytest.raises(ValueError, match=expected):
        simulate(SISA(), 1, loss=F.cross_entropy, batched=batched)


@pytest.mark.parametrize("batched", [None, True, False])
def test_loss_of_every_output(batched: bool | None) -> None:
    expected = r"loss must return one number per sample, .*, got \(\d+, 1\): take the mean over all"
    with pytest.raises(ValueError, match=expected):
        simulate(
            SISA(), 1, straight, least_squares(), loss=nn.MSELoss(reduction="none"), batched=batched
        )


@pytest.mark.parametrize("loss", ["mse", None, nn.CrossEntropyLoss])
def test_loss_that_is_no_function(loss: Any) -> None:
    expected = f"loss must be a function of outputs and targets, .*, got {re.escape(repr(loss))}"
    with pytest.raises(TypeError, match=expected):
        simulate(SISA(), 0, loss=loss)


SAMPLES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "dtype of inputs": (
        lambda x, y: (x.float(), y),
        r"inputs of torch.float32 of shape \(4,\) .*: .* same dtype",
    ),
    "number of inputs": (lambda x, y: (x[:, :3], y), r"inputs of .* of shape \(3,\) .*: mat1"),
    "dtype of targets": (lambda x, y: (x, y.float()), r"targets of torch.float32 of .*: .* Long"),
    "shape of targets": (lambda x, y: (x, y[:, None]), r"targets of .* of shape \(1,\): .* target"),
    "range of targets": (lambda x, y: (x, y + 3), r"targets of .*: Target \d is out of bounds"),
}


@pytest.mark.parametrize(("change", "reason"), SAMPLES.values(), ids=SAMPLES)
def test_samples_that_model_or_loss_cannot_take(change: Any, reason: str) -> None:
    clients = [change(x, y) for x, y in classes()]
    with pytest.raises(ValueError, match=f"clients must hold samples .* take, got .*{reason}"):
        simulate(SISA(), 0, clients=clients)


Build = Callable[[], Any]
REFUSED: dict[str, tuple[Build, str]] = {
    "clients": (
        lambda: simulate(SISA(), 0, clients=[]),
        "clients must hold the data of at least one client, got none",
    ),
    "participation 0": (
        lambda: simulate(SISA(), 0, participation=0.0),
        "participation must be in (0, 1], got 0.0",
    ),
    "participation 2": (
        lambda: simulate(SISA(), 0, participation=2.0),
        "participation must be in (0, 1], got 2.0",
    ),
    "seed": (lambda: simulate(SISA(), 0, seed=-1), "seed must be an integer >= 0, got -1"),
    "batched": (lambda: simulate(SISA(), 0, batched=0), "batched must be an integer >= 1, got 0"),
    "model": (
        lambda: simulate(SISA(), 0, nn.Identity),
        "model must have parameters that require a gradient, got none",
    ),
    "no samples": (
        lambda: simulate(SISA(), 0, clients=[(torch.zeros(0, 4), torch.zeros(0))]),
        "data of a client must hold at least one sample, got 0",
    ),
    "lengths": (
        lambda: simulate(SISA(), 0, clients=[(torch.zeros(3, 4), torch.zeros(2))]),
        "inputs and targets of a client must have one length, got 3 and 2",
    ),
    "rounds": (lambda: simulate(SISA(), 0).run(-1), "rounds must be an integer >= 0, got -1"),
    "every": (lambda: simulate(SISA(), 0).run(1, every=0), "every must be an integer >= 1, got 0"),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_messages(build: Build, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


# Measures, and the bar


@pytest.mark.parametrize("chunk", [4, 8192])
def test_accuracy(chunk: int) -> None:
    x, y = (torch.cat(column) for column in zip(*classes(), strict=True))
    model = mlp()
    measured = accuracy(x, y, chunk=chunk)(model)
    with torch.no_grad():
        outputs = model(x)
    assert measured["accuracy"] == pytest.approx(
        100 * float((outputs.argmax(1) == y).double().mean()), rel=1e-6
    )
    assert measured["loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-6)


NO_TEST_DATA: dict[str, tuple[Build, str]] = {
    "arrays": (lambda: accuracy(np.zeros((2, 4)), np.zeros(2)), "got ndarray and ndarray"),  # type: ignore[arg-type]
    "lengths": (lambda: accuracy(torch.zeros(3, 4), torch.zeros(2)), "at least 1, got 3 and 2"),
    "nothing": (lambda: accuracy(torch.zeros(0, 4), torch.zeros(0)), "at least 1, got 0 and 0"),
    "chunk": (lambda: accuracy(*classes()[0], chunk=0), "chunk must be an integer >= 1, got 0"),
    "a column": (
        lambda: accuracy(classes()[0][0], classes()[0][1][:, None], half_square)(mlp()),
        "targets must be one class per sample (or position of a text), shape (7,), got (7, 1)",
    ),
}


@pytest.mark.parametrize(("build", "message"), NO_TEST_DATA.values(), ids=NO_TEST_DATA)
def test_accuracy_on_something_else(build: Build, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        build()


def test_losses_of_texts_are_averaged_over_their_positions() -> None:
    outputs, targets = torch.randn(4, 3, 7), torch.randint(0, 3, (4, 7))
    losses = cross_entropy(outputs, targets)
    assert losses.shape == (4,)
    for i in range(4):
        torch.testing.assert_close(losses[i], F.cross_entropy(outputs[i].T, targets[i]))
    measured = accuracy(outputs, targets)(nn.Sequential(nn.Identity(), Unchanged()))
    hits = (outputs.argmax(1) == targets).float().mean()
    assert measured["accuracy"] == pytest.approx(100 * float(hits), rel=1e-6)
    assert measured["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)


class Unchanged(nn.Module):
    """With a parameter, which says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.zero


@pytest.mark.parametrize("rich", [False, True])
def test_the_bar_shows_where_a_run_stands(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if rich and importlib.util.find_spec("rich") is None:
        pytest.skip("rich is not installed")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    find = importlib.util.find_spec
    if not rich:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: None if name == "rich" else find(name, *a)
        )
    x, y = classes()[3]
    simulate(SISA(), 0).run(3, evaluate=accuracy(x, y))
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "accuracy" in shown


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(SISA(), 0).run(2)
    assert capsys.readouterr().err == ""


def test_pairs_may_be_of_any_length() -> None:
    """One sample, on one client, is a problem too."""
    lonely: list[Pair] = [classes()[0], (classes()[1][0][:1], classes()[1][1][:1])]
    for name in MAKERS:
        runs = [
            simulate(MAKERS[name](local=Epochs(1, 4)), 2, clients=lonely, batched=batched)
            for batched in (False, True)
        ]
        assert_equal_runs(runs)


NO_DATA = {
    "a list": (lambda: [torch.zeros(3, 4), torch.zeros(3)], "got list of 2"),
    "three tensors": (lambda: (torch.zeros(3),) * 3, "got tuple of 3"),
    "a number": (lambda: 5, "got int"),
    "inputs only": (lambda: torch.zeros(3, 4), "got Tensor"),
    "an array": (lambda: np.zeros((3, 4)), "got ndarray"),
    "a loader": (lambda: DataLoader([(torch.zeros(4), 0)]), "got DataLoader: give its dataset"),
}


@pytest.mark.parametrize(("build", "message"), NO_DATA.values(), ids=NO_DATA)
def test_data_of_another_kind(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=rf"data of a client must be a tuple .*, {message}"):
        Simulation(mlp(), [build()], SISA())


def test_arrays_and_lists_are_no_tensors() -> None:
    message = (
        "inputs and targets of a client must be tensors, got ndarray and list: torch.as_tensor"
    )
    with pytest.raises(TypeError, match=message):
        simulate(SISA(), 0, clients=[(np.zeros((2, 4)), [0, 1])])  # type: ignore[list-item]


@pytest.mark.parametrize("count", [1, 3])
def test_datasets_of_other_samples(count: int) -> None:
    data = TensorDataset(*[torch.zeros(3, 4)] * count)
    with pytest.raises(TypeError, match=r"dataset must be pairs \(input, target\) .*, got Tensor"):
        Simulation(mlp(), [data], SISA()).round()


def test_datasets_of_dictionaries() -> None:
    class Dictionaries(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return {"x": torch.zeros(4), "y": 0}

    data = Dictionaries(torch.zeros(3, 4))
    with pytest.raises(TypeError, match=r"dataset must be pairs \(input, target\) .*, got dict"):
        Simulation(mlp(), [data], SISA()).round()


@pytest.mark.parametrize(
    "clients",
    [{"a": 1}, (pair for pair in ()), torch.zeros(3, 4), np.zeros((3, 4))],
    ids=lambda clients: type(clients).__name__,
)
def test_clients_that_are_no_list(clients: Any) -> None:
    message = f"clients must be a list with the data of each client, got a {type(clients).__name__}"
    with pytest.raises(TypeError, match=message):
        Simulation(mlp(), clients, SISA())


def test_a_model_that_was_not_made() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got <class '.*Linear'>"):
        Simulation(nn.Linear, classes(), SISA())  # type: ignore[arg-type]


def test_dropout_is_the_same_when_a_round_is_repeated(tmp_path: Path) -> None:
    """And the caller's random numbers are left alone."""

    def simulation() -> Simulation:
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
        model.load_state_dict({n: torch.full_like(p, 0.1) for n, p in model.state_dict().items()})
        return Simulation(model, classes(), FedAvg(lr=0.1))

    whole = simulation()
    whole.run(4, progress=False)
    before = torch.random.get_rng_state()
    simulation().run(2, checkpoint=tmp_path / "c.pt", progress=False)
    torch.rand(7)
    resumed = simulation()
    resumed.run(4, checkpoint=tmp_path / "c.pt", progress=False)
    for name, w in whole.server.weights.items():
        assert torch.equal(w, resumed.server.weights[name])
    torch.random.set_rng_state(before)
    whole.round()
    Simulation(whole.model, classes(), FedAvg(lr=0.1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_algorithm_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"algorithm must be one of .*, got 'sisa'"):
        Simulation(mlp(), classes(), "sisa")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"algorithm must be one of .*, got a list$"):
        Simulation(mlp(), SISA(), classes())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"federated\.MISA\(\), got <class '.*optim\.misa\.MISA'>"):
        Simulation(mlp(), classes(), torchpisa.MISA)  # type: ignore[arg-type]


def test_a_mean_loss_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="loss must return one number per sample"):
        Simulation(mlp(), classes(), SISA(), loss=F.cross_entropy)


@pytest.mark.parametrize("evaluate", [0.9, (torch.zeros(3, 4), torch.zeros(3))])
def test_evaluate_that_is_no_function(evaluate: Any, tmp_path: Path) -> None:
    """The log of an earlier run is left alone."""
    log = tmp_path / "log.jsonl"
    log.write_text("rows\n")
    with pytest.raises(TypeError, match=r"evaluate must be a function .*, got a (float|tuple)"):
        simulate(SISA(), 0).run(1, evaluate=evaluate, log=log, progress=False)
    assert log.read_text() == "rows\n"


def test_paths_that_are_none() -> None:
    with pytest.raises(TypeError, match="memory must be a folder or None, got True"):
        simulate(SISA(), 0, memory=True)
    for name in ("log", "checkpoint"):
        with pytest.raises(TypeError, match=f"{name} must be a file or None, got True"):
            simulate(SISA(), 0).run(1, **{name: True})  # type: ignore[arg-type]


def test_evaluate_that_returns_nothing() -> None:
    def nothing(model: nn.Module) -> Any:
        return None

    with pytest.raises(TypeError, match=r"evaluate must return numbers by name .*, got None"):
        simulate(SISA(), 0).run(1, evaluate=nothing, progress=False)


def test_evaluate_that_returns_something_else() -> None:
    with pytest.raises(TypeError, match=r"evaluate must return numbers by name .*, got \{'a': <"):
        simulate(SISA(), 0).run(1, evaluate=lambda model: {"a": object()}, progress=False)  # type: ignore[dict-item]


NUMPY: dict[str, Callable[[], Simulation]] = {
    "participation": lambda: simulate(SISA(), 0, participation=lambda k: np.arange(k % 5 + 1)),
    "lr": lambda: simulate(FedAvg(lr=np.float64(0.1)), 0),
    "lr_decay": lambda: simulate(FedAvg(lr=0.1, lr_decay=lambda k: np.cos(0.1 * k)), 0),
    "delay": lambda: simulate(
        SISA(), 0, timing=Timing(lambda client, k: np.float64(1 + client * k), enough=2)
    ),
}


@pytest.mark.parametrize("start", NUMPY.values(), ids=NUMPY)
def test_a_checkpoint_can_be_read_whoever_made_its_numbers(
    start: Callable[[], Simulation], tmp_path: Path
) -> None:
    def evaluate(model: nn.Module) -> Any:
        return {"one": np.float64(0.5), "two": torch.tensor(2), "three": np.arange(2)}

    path, log = tmp_path / "run.pt", tmp_path / "log.jsonl"
    for rounds in (3, 6):
        run = start()
        rows = run.run(rounds, evaluate=evaluate, checkpoint=path, log=log, progress=False)
    assert [rows[-1][name] for name in ("one", "two", "three")] == [0.5, 2, [0, 1]]
    assert len(log.read_text(encoding="utf-8").splitlines()) == 7
    whole = start()
    whole.run(6, progress=False)
    assert torch.equal(flat(run.server.weights), flat(whole.server.weights))


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    path, log = tmp_path / "c.pt", tmp_path / "log.jsonl"
    path.write_text("not a checkpoint", encoding="utf-8")
    log.write_text("old\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"checkpoint must be a file .*c\.pt, which cannot be read"
    ):
        simulate(SISA(), 0).run(1, checkpoint=path, log=log, progress=False)
    assert path.read_text(encoding="utf-8") == "not a checkpoint"
    assert log.read_text(encoding="utf-8") == "old\n"


@pytest.mark.parametrize("content", [mlp().state_dict(), [1]], ids=["weights", "a list"])
def test_a_checkpoint_of_something_else(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"checkpoint must .*model\.pt, which holds something else"
    ):
        simulate(SISA(), 0).run(1, checkpoint=path, progress=False)
    assert path.read_bytes() == before
