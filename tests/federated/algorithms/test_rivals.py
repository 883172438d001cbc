"""The rivals against transcriptions of their papers, and where algorithms coincide."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.federated.problems import (
    MAKERS,
    ByHand,
    Pair,
    distance,
    half_square,
    least_squares,
    memories,
    optimum,
    seeded,
    shares,
    simulate,
    straight,
    weighted_sum,
)
from tests.reference import rivals as literal
from tests.reference.rivals import Params, Task
from torchpisa.federated import (
    PISA,
    AdaptiveFedADMM,
    Algorithm,
    Epochs,
    FedAdagrad,
    FedAdam,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedMuon,
    FedPD,
    FedYogi,
    FullGradient,
    LinearDecay,
    LocalMISA,
    Scaffold,
    ServerMuon,
)
from torchpisa.federated.algorithms.base import Tensors
from torchpisa.preconditioners import Identity

SIZES = (7, 12, 3, 20, 9)
ROUNDS = 9


def tall() -> nn.Module:
    """Return a linear model with more rows than columns, which Muon scales."""
    return seeded(lambda: nn.Linear(3, 5))


def five_classes() -> list[Pair]:
    generator = torch.Generator().manual_seed(4)
    clients = []
    for i, n in enumerate(SIZES):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64) + 0.3 * i
        y = torch.randint(0, 5, (n,), generator=generator)
        y[: n // 2] = i
        clients.append((x, y))
    return clients


def some(iteration: int) -> Sequence[int]:
    """Return different clients in different rounds, a single one in round 5, nobody in round 3."""
    if iteration == 3:
        return []
    return [2] if iteration == 5 else [i for i in range(5) if (iteration + 2 * i) % 3]


def everybody(iteration: int) -> Sequence[int]:
    return range(5)


def softmax_gradient(x: Any, y: Any, w: Params, decay: float) -> Params:
    """Return the gradient of the mean cross-entropy of a linear model plus decay / 2 |w|^2."""
    logits = x @ w["weight"].T + w["bias"]
    likely = np.exp(logits - logits.max(1, keepdims=True))
    likely /= likely.sum(1, keepdims=True)
    likely[np.arange(len(y)), y] -= 1
    weight, bias = likely.T @ x / len(y), likely.mean(0)
    return Params(weight=weight + decay * w["weight"], bias=bias + decay * w["bias"])


def task_of(algorithm: Algorithm, present: Callable[[int], Sequence[int]] = some) -> Task:
    """Return what the algorithm's clients compute, for a transcription."""
    clients = [(x.numpy(), y.numpy()) for x, y in five_classes()]

    def plan(t: int, i: int) -> list[torch.Tensor]:
        return algorithm.local.plan(SIZES[i], (0, str(i)), t)

    def gradient(t: int, i: int, k: int, w: Params) -> Params:
        index = plan(t, i)[k].numpy()
        x, y = clients[i]
        return softmax_gradient(x[index], y[index], w, algorithm.weight_decay)

    return Task(
        x0=first_weights(),
        p=[n / sum(SIZES) for n in SIZES],
        gradient=gradient,
        steps=lambda t, i: len(plan(t, i)),
        present=present,
        rounds=ROUNDS,
    )


def first_weights() -> Params:
    return Params({name: w.detach().numpy() for name, w in tall().named_parameters()})


def tensors(params: Params) -> Tensors:
    return {name: torch.from_numpy(value) for name, value in params.items()}


def assert_equals(
    algorithm: Algorithm,
    expected: Params,
    present: Callable[[int], Sequence[int]] = some,
    tolerance: float = 1e-10,
) -> None:
    start = dict(tall().named_parameters())
    assert distance(start, tensors(expected)) > 0.05
    for batched in (False, True):
        simulation = simulate(
            algorithm, ROUNDS, tall, five_classes(), participation=present, batched=batched
        )
        assert distance(simulation.server.weights, tensors(expected)) <= tolerance


EPOCH = Epochs(1, batch_size=4)
WORKS = pytest.mark.parametrize(
    "local",
    [EPOCH, FullGradient(steps=2)],
    ids=["epochs", "full gradients"],
)
DECAY = {"weight_decay": 0.05}


# The papers


def test_fedavgm() -> None:
    rates = {"lr": 0.1, "server_lr": 0.7, "server_lr_decay": 0.9}
    algorithm = FedAvgM(**rates, server_momentum=0.8, local=EPOCH, **DECAY)
    expected = literal.fedavgm(task_of(algorithm), 0.1, lambda t: 0.7 * 0.9**t, 0.8)
    assert_equals(algorithm, expected)


@pytest.mark.parametrize(
    ("make", "rule", "beta1"),
    [(FedAdagrad, "adagrad", 0.3), (FedAdam, "adam", 0.9), (FedYogi, "yogi", 0.9)],
)
def test_adaptive_servers(make: Any, rule: str, beta1: float) -> None:
    settings: dict[str, Any] = {"beta1": beta1, "tau": 0.02, "server_lr": 0.2}
    if rule != "adagrad":
        settings["beta2"] = 0.9
    decay = LinearDecay(ROUNDS)
    algorithm = make(lr=0.1, local=EPOCH, server_lr_decay=decay, **settings, **DECAY)

    def eta(t: int) -> float:
        return 0.2 * (1 - t / ROUNDS)

    expected = literal.fedopt(task_of(algorithm), rule, 0.1, eta, beta1, 0.9, 0.02)
    assert_equals(algorithm, expected)


@pytest.mark.parametrize(
    ("nesterov", "local"), [(True, FullGradient()), (False, EPOCH)], ids=["FedSGD", "epochs"]
)
def test_server_muon(nesterov: bool, local: Any) -> None:
    algorithm = ServerMuon(
        lr=0.5,
        server_lr=0.05,
        server_lr_decay=0.9,
        server_momentum=0.8,
        nesterov=nesterov,
        vector_lr=0.03,
        betas=(0.7, 0.8),
        eps=1e-3,
        local=local,
        **DECAY,
    )
    numbers = (0.5, 0.05, 0.9, 0.8, nesterov, 0.03, (0.7, 0.8), 1e-3)
    assert_equals(algorithm, literal.server_muon(task_of(algorithm), *numbers))


@WORKS
def test_feddyn(local: Any) -> None:
    algorithm = FedDyn(lr=0.1, alpha=0.6, local=local, **DECAY)
    assert_equals(algorithm, literal.feddyn(task_of(algorithm), 0.1, 0.6))


@WORKS
@pytest.mark.parametrize("present", [everybody, some])
def test_fedpd(present: Any, local: Any) -> None:
    algorithm = FedPD(lr=0.1, eta=2.0, local=local, **DECAY)
    assert_equals(algorithm, literal.fedpd(task_of(algorithm, present), 0.1, 2.0), present)


@WORKS
@pytest.mark.parametrize("start", ["server", "client"])
def test_fedadmm(start: Any, local: Any) -> None:
    algorithm = FedADMM(lr=0.1, rho=0.6, start_from=start, local=local, **DECAY)
    expected, _ = literal.fedadmm(task_of(algorithm), 0.1, 0.6, start == "client")
    assert_equals(algorithm, expected)


@WORKS
@pytest.mark.parametrize("rho", [0.2, 1.5])
def test_adaptive_fedadmm(rho: float, local: Any) -> None:
    algorithm = AdaptiveFedADMM(lr=0.1, rho=rho, mu=1.3, tau=1.5, local=local, **DECAY)
    expected, penalties = literal.fedadmm(task_of(algorithm), 0.1, rho, False, 1.3, 1.5)
    assert_equals(algorithm, expected)
    # Small penalties rise and large ones fall; else neither rule would be tested.
    assert max(penalties) > rho if rho < 1 else min(penalties) < rho


@WORKS
def test_fedmuon(local: Any) -> None:
    algorithm = FedMuon(lr=0.03, alpha=0.3, local=local, **DECAY)
    assert_equals(algorithm, literal.fedmuon(task_of(algorithm), 0.03, 0.3))


@WORKS
def test_local_misa(local: Any) -> None:
    """Ours, in the company of those whose clients move, too."""
    numbers = {"sigma": 0.5, "rho": 2.0, "momentum": 0.6, "consensus_decay": 0.1}
    algorithm = LocalMISA(**numbers, lr=LinearDecay(ROUNDS), method="svd", local=local, **DECAY)
    expected = literal.local_misa(task_of(algorithm), *numbers.values(), lambda t: 1 - t / ROUNDS)
    assert_equals(algorithm, expected)


@WORKS
def test_scaffold_with_a_warm_start(local: Any) -> None:
    algorithm = Scaffold(lr=0.1, server_lr=1.5, warm_start=True, local=local, **DECAY)
    assert_equals(algorithm, literal.warm_scaffold(task_of(algorithm), 0.1, 1.5))


# Where algorithms coincide


def ends(*algorithms: Algorithm, present: Any = some) -> list[Tensors]:
    return [
        simulate(a, ROUNDS, tall, five_classes(), participation=present).server.weights
        for a in algorithms
    ]


def test_fedavgm_without_momentum_is_fedavg() -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "server_lr": 0.7, "lr_decay": 0.9}
    a, b = ends(FedAvgM(server_momentum=0.0, **settings), FedAvg(**settings))
    assert distance(a, b) <= 1e-14


def test_adaptive_servers_with_a_large_tau_are_fedavg() -> None:
    """Then v is negligible beside tau^2 (Adam, Yogi, Adagrad alike) and the step is eta / 2 tau."""
    tau = 1e5
    for make in (FedAdagrad, FedAdam, FedYogi):
        extra = {} if make is FedAdagrad else {"beta2": 1 - 1e-12}
        a, b = ends(make(lr=0.1, beta1=0.0, tau=tau, server_lr=2 * tau, **extra), FedAvg(lr=0.1))
        assert distance(a, b) <= 1e-9


def test_with_everybody_present_the_relatives_of_admm_are_one_algorithm() -> None:
    """FedDyn, FedADMM and PISA with the identity; FedPD is FedADMM from the clients' weights."""
    lr, rho, local = 0.1, 0.6, FullGradient(steps=3)
    pisa = PISA(preconditioner=Identity(), sigma=rho, rho=1 / lr - rho, local=local)
    dyn = FedDyn(lr=lr, alpha=rho, local=local)
    admm = FedADMM(lr=lr, rho=rho, local=local)
    a, b, c = ends(pisa, dyn, admm, present=everybody)
    assert distance(a, b) <= 1e-12
    assert distance(a, c) <= 1e-12
    own = FedADMM(lr=lr, rho=rho, start_from="client", local=local)
    d, e = ends(own, FedPD(lr=lr, eta=1 / rho, local=local), present=everybody)
    assert distance(d, e) <= 1e-12
    assert distance(a, d) > 1e-3


def test_without_everybody_they_differ() -> None:
    """FedADMM keeps the weights of absent clients, FedDyn takes the mean of those present."""
    local = FullGradient(steps=3)
    pisa = PISA(preconditioner=Identity(), sigma=0.6, rho=10 - 0.6, local=local)
    a, b, c = ends(
        pisa, FedDyn(lr=0.1, alpha=0.6, local=local), FedADMM(lr=0.1, rho=0.6, local=local)
    )
    assert min(distance(a, b), distance(a, c), distance(b, c)) > 1e-3


def test_feddyn_with_a_small_alpha_adds_up_all_movements() -> None:
    """Its regulariser vanishes, the correction h / alpha does not: it is the sum of movements."""
    alpha = 1e-9
    simulation = simulate(
        FedDyn(lr=0.05, alpha=alpha), 4, tall, five_classes(), participation=everybody
    )
    average = simulate(FedAvg(lr=0.05), 1, tall, five_classes(), participation=everybody)
    w = dict(tall().named_parameters())
    total = {name: torch.zeros_like(value) for name, value in w.items()}
    for t in range(4):
        average.server = type(average.server)(w, {}, {}, t)
        average.round()
        moved = {name: new - w[name] for name, new in average.server.weights.items()}
        total = {name: total[name] + m for name, m in moved.items()}
        w = {name: value + moved[name] + total[name] for name, value in w.items()}
    assert distance(simulation.server.weights, w) <= 1e-6


def test_adaptive_fedadmm_with_factor_one_is_fedadmm() -> None:
    a, b = ends(AdaptiveFedADMM(lr=0.1, rho=0.6, tau=1.0), FedADMM(lr=0.1, rho=0.6))
    assert distance(a, b) <= 1e-13


def test_fedmuon_of_one_client_is_muon() -> None:
    """C_i = C then, and nothing is corrected."""
    x, y = five_classes()[3]
    simulation = simulate(FedMuon(lr=0.03, alpha=0.3, local=FullGradient(2)), 4, tall, [(x, y)])
    w, m = first_weights(), first_weights().zero
    for _ in range(8):
        m = 0.7 * m + 0.3 * softmax_gradient(x.numpy(), y.numpy(), w, 0.0)
        direction = Params(
            weight=literal.newton_schulz(m["weight"]), bias=m["bias"] / np.linalg.norm(m["bias"])
        )
        w = w - 0.03 * direction
    assert distance(simulation.server.weights, tensors(w)) <= 1e-12


def test_a_warm_start_moves_nothing_and_sets_the_gradients() -> None:
    clients = five_classes()
    algorithm = Scaffold(lr=0.1, warm_start=True, local=FullGradient(steps=3))
    simulation = simulate(algorithm, 1, tall, clients)
    start = dict(tall().named_parameters())
    assert all(torch.equal(w, start[name]) for name, w in simulation.server.weights.items())
    w = first_weights()
    for memory, (x, y) in zip(memories(simulation), clients, strict=True):
        gradient = tensors(softmax_gradient(x.numpy(), y.numpy(), w, 0.0))
        assert distance(memory["control"], gradient) <= 1e-13


# Where they converge to


@pytest.mark.parametrize(
    "algorithm",
    [
        FedDyn(lr=0.2, alpha=1.0, local=FullGradient(steps=3)),
        FedPD(lr=0.2, eta=1.0, local=FullGradient(steps=3)),
        FedADMM(lr=0.2, rho=1.0, local=FullGradient(steps=3)),
        AdaptiveFedADMM(lr=0.2, rho=0.3, start_from="client", local=FullGradient(steps=3)),
        Scaffold(lr=0.2, warm_start=True, local=FullGradient(steps=3)),
    ],
    ids=["FedDyn", "FedPD", "FedADMM", "AdaptiveFedADMM", "Scaffold"],
)
def test_the_optimum_is_found_with_a_part_of_the_clients(algorithm: Algorithm) -> None:
    clients = least_squares()
    simulation = simulate(algorithm, 40, straight, clients, loss=half_square, participation=0.6)
    assert distance(simulation.server.weights, {"weight": optimum(clients)}) <= 1e-3


# What the server keeps


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["FedDyn", "FedPD", "AdaptiveFedADMM", "FedMuon", "ScaffoldWarm"])
def test_the_server_keeps_the_weighted_sum(name: str, batched: bool) -> None:
    simulation = simulate(MAKERS[name](local=EPOCH), ROUNDS, participation=some, batched=batched)
    alphas = [n / sum(SIZES) for n in SIZES]
    assert simulation.server.memory
    for kind, sums in simulation.server.memory.items():
        total = weighted_sum(memories(simulation), kind, alphas)
        assert distance(sums, total) <= 1e-12


def test_buffers_do_not_shrink_when_a_client_joins() -> None:
    """They belong to no client, unlike the sums."""
    algorithm = FedAvgM(lr=0.1)
    simulation = simulate(algorithm, 3)
    server = algorithm.admit(simulation.server, 51, 80)
    assert server.buffers is simulation.server.buffers


@pytest.mark.parametrize("adaptive", [False, True])
def test_fedadmm_with_clients_that_join_and_leave(adaptive: bool) -> None:
    """Its weights stay the mean over those there, and the optimum of their data is found."""
    make = AdaptiveFedADMM if adaptive else FedADMM
    algorithm = make(lr=0.2, rho=1.0, local=FullGradient(steps=3))
    clients = least_squares()
    late = clients.pop(2)
    hand = ByHand(algorithm, straight(), clients, half_square)
    for iteration in range(6):
        hand.round([i for i in range(3) if (iteration + i) % 3])  # client 3 was never present
    before = hand.server.weights["weight"]
    hand.initial = hand.server.weights
    hand.join(late)
    hand.round([0])
    total, weight = torch.zeros_like(before), 0.0
    for i, alpha in enumerate(shares(hand.clients)):
        client = hand.memory[i]
        rho = float(client["penalty"]["penalty"])
        first = straight().weight.detach() if i == 3 else before
        total += alpha * (client["anchor"]["weight"] if rho else 1.0 * first)
        weight += alpha * (rho or 1.0)
    assert float((hand.server.weights["weight"] - total / weight).norm()) <= 1e-13
    # Client 1 leaves with all that it has contributed.
    sizes = [len(y) for _, y in hand.clients]
    n, n_1 = sum(sizes), sizes[1]
    memory = {
        kind: {
            name: (n * t - n_1 * hand.memory[1][kind][name]) / (n - n_1) for name, t in sums.items()
        }
        for kind, sums in hand.server.memory.items()
    }
    hand.server = replace(hand.server, memory=memory)
    del hand.clients[1], hand.memory[1]
    for _ in range(40):
        hand.round(range(4))
    assert distance(hand.server.weights, {"weight": optimum(hand.clients)}) <= 1e-3


# Arguments

RANGES: list[tuple[Any, str, Any, str]] = [
    (FedAvgM, "server_momentum", 1.0, "in [0, 1)"),
    (FedAdam, "beta1", 1.0, "in [0, 1)"),
    (FedAdam, "beta2", -0.1, "in [0, 1)"),
    (FedYogi, "beta2", 1.0, "in [0, 1)"),
    (FedAdagrad, "tau", 0.0, "a finite number > 0"),
    (ServerMuon, "server_lr", 0.0, "a finite number > 0"),
    (ServerMuon, "server_lr_decay", 0.0, "in (0, 1]"),
    (ServerMuon, "server_momentum", 1.0, "in [0, 1)"),
    (ServerMuon, "ns_steps", 0, "an integer >= 1"),
    (ServerMuon, "vector_lr", 0.0, "a finite number > 0"),
    (ServerMuon, "eps", -1.0, "a finite number >= 0"),
    (ServerMuon, "betas", 0.9, "two numbers in [0, 1)"),
    (ServerMuon, "betas", (0.9, 0.9, 0.9), "two numbers in [0, 1)"),
    (FedDyn, "alpha", 0.0, "a finite number > 0"),
    (FedPD, "eta", 0.0, "a finite number > 0"),
    (FedADMM, "rho", 0.0, "a finite number > 0"),
    (FedADMM, "start_from", "me", "one of 'server', 'client'"),
    (AdaptiveFedADMM, "mu", 0.5, "a finite number >= 1"),
    (AdaptiveFedADMM, "tau", 0.5, "a finite number >= 1"),
    (FedMuon, "lr", 0.0, "a finite number > 0"),
    (FedMuon, "alpha", 0.0, "in (0, 1]"),
    (FedMuon, "ns_steps", 0, "an integer >= 1"),
    (FedMuon, "weight_decay", -1.0, "a finite number >= 0"),
    (FedMuon, "lr_decay", 2.0, "in (0, 1]"),
    (Scaffold, "warm_start", 1, "one of True, False"),
]


@pytest.mark.parametrize(("make", "name", "value", "legal"), RANGES)
def test_messages_name_argument_value_and_range(
    make: Any, name: str, value: Any, legal: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {legal}, got {value!r}")):
        make(**{"lr": 0.1, name: value})


@pytest.mark.parametrize("make", [FedDyn, FedPD, FedADMM, FedMuon])
def test_no_server_rate_where_the_paper_has_none(make: Any) -> None:
    with pytest.raises(TypeError, match="server_lr"):
        make(lr=0.1, server_lr=2.0)
