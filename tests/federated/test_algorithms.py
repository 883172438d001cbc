"""The algorithms against the optimizers, against their papers, and against known optima."""

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchpisa
from tests.federated.problems import (
    MAKERS,
    ByHand,
    Pair,
    classes,
    cross,
    distance,
    flat,
    half_square,
    least_squares,
    logistic,
    matrices,
    memories,
    mlp,
    optimum,
    parameters,
    seeded,
    shares,
    simulate,
    straight,
    weighted_sum,
)
from torchpisa.federated import (
    MISA,
    PISA,
    SISA,
    Algorithm,
    Epochs,
    FedAvg,
    FedNova,
    FedProx,
    FullGradient,
    LinearDecay,
    LocalMISA,
    Minibatches,
    Scaffold,
)
from torchpisa.federated.algorithms.base import Message, ServerState, Tensors
from torchpisa.federated.clients.local_work import LocalWork
from torchpisa.penalty import Every
from torchpisa.preconditioners import (
    Hessian,
    Identity,
    NewtonSchulz,
    Preconditioner,
    SecondMoment,
    Spectral,
    SpectralConsensus,
)

Schedule = Callable[[int], Sequence[int]]


def everybody(iteration: int) -> Sequence[int]:
    return range(5)


def some(iteration: int) -> Sequence[int]:
    """Return different clients in different rounds, sometimes a single one, and nobody in two."""
    if iteration in (4, 17):
        return []
    if iteration % 7 == 6:
        return [iteration % 5]
    return [i for i in range(5) if (iteration + 2 * i) % 3]


# Equality with the optimizers


def by_optimizer(
    opt: Any, model: nn.Module, rounds: int, schedule: Schedule, hessian: Hessian | None = None
) -> None:
    """Train with an optimizer whose slot i sees the mean gradient of client i, or is skipped."""
    for iteration in range(rounds):
        present = schedule(iteration)
        for i, (x, y) in enumerate(classes()):
            opt.zero_grad()
            if i not in present:
                opt.skip(batch=i)
                continue
            outputs = model(x)
            loss = nn.functional.cross_entropy(outputs, y)
            loss.backward(retain_graph=hessian is not None)
            if hessian is not None:
                hessian.observe(loss, outputs)
            opt.step(batch=i)


def assert_equals_optimizer(
    federated: Algorithm,
    make: Callable[[list[nn.Parameter], list[float]], Any],
    model: Callable[[], nn.Module],
    schedule: Schedule,
    hessian: Hessian | None = None,
    rounds: int = 20,
) -> None:
    expected = model()
    opt = make(list(expected.parameters()), shares(classes()))
    by_optimizer(opt, expected, rounds, schedule, hessian)
    # Otherwise two runs that stand still would be equal.
    assert distance(parameters(model()), parameters(expected)) > 0.05
    for batched in (False,) if hessian is not None else (False, True):
        simulation = simulate(federated, rounds, model, participation=schedule, batched=batched)
        assert distance(parameters(simulation.model), parameters(expected)) <= 1e-12
        for i, memory in enumerate(memories(simulation)):
            duals = {name: opt.state[w][f"dual.{i}"] for name, w in expected.named_parameters()}
            assert distance(memory["dual"], duals) <= 1e-11


ALL: dict[str, Any] = {"gamma": Every(0.9, 3), "weight_decay": 0.05, "consensus_decay": 0.1}
SETTINGS = pytest.mark.parametrize(
    ("common", "schedule"),
    [({}, everybody), ({"gamma": 0.97}, some), (ALL, some)],
    ids=["plain", "gamma", "all"],
)
SCHEMES: dict[str, dict[str, Any]] = {
    "I": {"scheme": "adagrad"},
    "II": {"scheme": "rmsprop", "beta": 0.9},
    "III": {"scheme": "adam", "beta": 0.99},
    "capped": {"scheme": "adam", "beta": 0.99, "eta": 0.05},
    "eps": {"scheme": "rmsprop", "beta": 0.9, "eps": 1e-2},
}


@SETTINGS
def test_sisa_is_the_optimizer(common: dict[str, Any], schedule: Schedule) -> None:
    settings = {"sigma": 1.5, "rho": 2.0, "beta": 0.99, **common}
    assert_equals_optimizer(
        SISA(**settings),
        lambda params, weights: torchpisa.SISA(params, batches=5, weights=weights, **settings),
        mlp,
        schedule,
    )


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_schemes_of_sisa(scheme: dict[str, Any]) -> None:
    settings = {"sigma": 1.5, "rho": 5.0, **scheme}
    assert_equals_optimizer(
        SISA(**settings),
        lambda params, weights: torchpisa.SISA(params, batches=5, weights=weights, **settings),
        logistic,
        some,
    )


@SETTINGS
def test_misa_is_the_optimizer(common: dict[str, Any], schedule: Schedule) -> None:
    settings = {"sigma": 0.5, "rho": 2.0, **common}
    solver = SpectralConsensus(0.8, Spectral(match_rms=True, method="smooth"))
    assert_equals_optimizer(
        MISA(**settings, momentum=0.8),
        lambda params, weights: torchpisa.PISA(
            params, solver, batches=5, weights=weights, **settings
        ),
        mlp,
        schedule,
    )


@pytest.mark.parametrize("name", ["PISA", "SISA", "MISA", "LocalMISA"])
def test_a_relative_lr_divides_sigma_and_rho(name: str) -> None:
    """Also with several local steps, decay and absent clients."""
    settings = {"sigma": 3.0, "rho": 1.5, "gamma": Every(0.9, 3), "consensus_decay": 0.1}
    local = FullGradient(steps=3)

    def end(**changes: float) -> Tensors:
        algorithm = MAKERS[name](**{"lr": 1.0, **settings, "local": local, **changes})
        return simulate(algorithm, 12, participation=some).server.weights

    slow = end(lr=0.4)
    assert distance(slow, end(sigma=3.0 / 0.4, rho=1.5 / 0.4)) <= 1e-12
    assert distance(slow, end()) > 1e-3


def test_a_schedule_is_that_of_the_optimizer() -> None:
    settings: dict[str, Any] = {"sigma": 1.5, "rho": 2.0, "beta": 0.99, "consensus_decay": 0.1}
    decay = LinearDecay(20)
    made: list[Any] = []

    def make(params: list[nn.Parameter], weights: list[float]) -> Any:
        made.append(torchpisa.SISA(params, batches=5, weights=weights, **settings))
        return made[0]

    def present(iteration: int) -> Sequence[int]:
        made[0].param_groups[0]["lr"] = decay(iteration)
        return some(iteration)

    assert_equals_optimizer(SISA(**settings, lr=decay), make, mlp, present)


def test_local_misa_with_one_local_gradient_is_misa() -> None:
    settings: dict[str, Any] = {"rho": 3.0, "gamma": 0.98, "weight_decay": 0.02}
    for local in (FullGradient(), Minibatches(1, batch_size=4)):
        ends = [
            simulate(make(**settings, local=local), 9, participation=some).server
            for make in (MISA, LocalMISA)
        ]
        assert distance(ends[0].weights, ends[1].weights) <= 1e-12
        assert ends[0].numbers == ends[1].numbers


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("make", [MISA, LocalMISA])
def test_misa_takes_sigma_from_the_first_mean_gradient(make: Any, batched: bool) -> None:
    """From those present in the first round that has anybody; nobody moves before it is known."""
    clients, start = classes(), mlp()
    first = [1, 3]
    algorithm = make(rho=4.0, momentum=0.8, damping=0.05, local=FullGradient(steps=3))
    simulation = simulate(
        algorithm, 2, participation=lambda iteration: first if iteration else [], batched=batched
    )
    x, y = (torch.cat([clients[i][column] for i in first]) for column in (0, 1))
    nn.functional.cross_entropy(start(x), y).backward()
    norm = math.sqrt(sum(float(w.grad.square().sum()) for w in start.parameters()))
    assert simulation.server.numbers["sigma"] == pytest.approx(0.05 * 4.0 * norm, rel=1e-12)


@pytest.mark.parametrize("make", [MISA, LocalMISA])
def test_misa_does_not_depend_on_the_scale_of_the_loss(make: Any) -> None:
    def end(scale: float) -> Tensors:
        algorithm = make(rho=4.0, local=Epochs(1, batch_size=4))
        loss = lambda outputs, targets: scale * cross(outputs, targets)  # noqa: E731
        return simulate(algorithm, 8, participation=some, loss=loss).server.weights

    assert distance(end(1.0), end(1e4)) <= 1e-9


def calibrated_by_hand(clients: Sequence[Pair], rounds: int, decay: float) -> Tensors:
    """Return the weights of SISA without sigma and rho, transcribed; `some` are present."""
    model, alphas = mlp(), shares(clients)
    w = flat(parameters(model))
    rho = 1.3 * math.sqrt(len(w))
    duals, moments = (torch.zeros(len(clients), len(w), dtype=torch.float64) for _ in range(2))
    steps, beta, sigma = [0] * len(clients), 0.999, 0.0
    for iteration in range(rounds):
        if not some(iteration):
            continue
        contributions, squares, share = duals.clone(), 0.0, 0.0
        for i in some(iteration):
            nn.utils.vector_to_parameters(w, model.parameters())
            x, y = clients[i]
            loss = nn.functional.cross_entropy(model(x), y)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            r = duals[i] + nn.utils.parameters_to_vector(gradients)
            moments[i] = beta * moments[i] + (1 - beta) * r * r
            steps[i] += 1
            root = (moments[i] / (1 - beta ** steps[i])).sqrt()
            delta = -0.3 * r if sigma == 0 else -sigma * r / (sigma + rho * root)
            contributions[i] += 2 * delta
            duals[i] += delta
            squares += alphas[i] * float(delta.square().sum())
            share += alphas[i]
        if sigma == 0:
            sigma = 2.0 * math.sqrt(squares / share) / 0.3
        summed = sum(a * u for a, u in zip(alphas, contributions, strict=True))
        w = w + (summed - decay * w) / (sigma + decay)
    nn.utils.vector_to_parameters(w, model.parameters())
    return parameters(model)


@pytest.mark.parametrize("batched", [False, True])
def test_sisa_without_sigma_is_its_transcription(batched: bool) -> None:
    algorithm = SISA(sigma=None, rho=None, consensus_decay=0.01)
    simulation = simulate(algorithm, 20, participation=some, batched=batched)
    expected = calibrated_by_hand(classes(), 20, decay=0.01)
    assert distance(simulation.server.weights, expected) <= 1e-12
    assert distance(expected, parameters(mlp())) > 0.1


@pytest.mark.parametrize("local", [FullGradient(), FullGradient(3), Minibatches(2, batch_size=4)])
def test_sisa_without_sigma_does_not_depend_on_the_scale_of_the_loss(local: LocalWork) -> None:
    def end(scale: float) -> ServerState:
        algorithm = SISA(sigma=None, rho=None, gamma=0.99, local=local)
        loss = lambda outputs, targets: scale * cross(outputs, targets)  # noqa: E731
        return simulate(algorithm, 12, participation=some, loss=loss).server

    ends = [end(scale) for scale in (1.0, 1e4, 1e-6)]
    for other, scale in zip(ends[1:], (1e4, 1e-6), strict=True):
        assert distance(ends[0].weights, other.weights) <= 1e-10
        assert other.numbers["sigma"] == pytest.approx(scale * ends[0].numbers["sigma"], rel=1e-10)


@pytest.mark.parametrize("batched", [False, True])
def test_sisa_without_sigma_waits_for_a_gradient(batched: bool) -> None:
    """Nobody is there in the first round, and the gradient of the second is zero."""
    clients = classes()
    clients[0] = (torch.zeros_like(clients[0][0]), clients[0][1])
    model = lambda: seeded(lambda: nn.Linear(4, 3, bias=False))  # noqa: E731
    schedule: Callable[[int], Sequence[int]] = lambda k: ([], [0], [0, 1, 2])[k]  # noqa: E731
    options = {"clients": clients, "participation": schedule, "batched": batched}
    algorithm = SISA(sigma=None, rho=None)
    for rounds in (1, 2):
        server = simulate(algorithm, rounds, model, **options).server
        assert (server.iteration, server.numbers) == (rounds, {"sigma": 0.0})
        assert distance(server.weights, parameters(model())) == 0
    server = simulate(algorithm, 3, model, **options).server
    assert server.numbers["sigma"] > 0
    assert 0 < distance(server.weights, parameters(model())) < math.inf


def test_a_given_rho_or_sigma_stays() -> None:
    weights = parameters(mlp())
    rho = 1.3 * math.sqrt(sum(w.numel() for w in weights.values()))
    for algorithm, expected in (
        (SISA(sigma=3.0, rho=None), {"sigma": 3.0, "rho": pytest.approx(rho)}),
        (SISA(sigma=3.0, rho=0.0), {"sigma": 3.0, "rho": 0.0}),
        (SISA(sigma=None, rho=7.0), {"sigma": 4.0, "rho": 7.0}),
    ):
        server = algorithm.start(weights)
        if algorithm.sigma is None:
            server = replace(server, numbers={"sigma": 4.0})
        sent = dict(algorithm.broadcast(server).numbers)
        assert sent.pop("share", 1.0) == 1.0
        assert sent == {**expected, "lr": 1.0}


def test_the_cap_of_the_moment_matters() -> None:
    """Else the case above could not tell whether eta is passed on."""
    capped, free = (SISA(sigma=1.5, rho=5.0, eta=eta) for eta in (0.05, math.inf))
    ends = [simulate(algorithm, 10, logistic).server.weights for algorithm in (capped, free)]
    assert distance(*ends) > 1e-3


PRECONDITIONERS: dict[str, Callable[[], Preconditioner]] = {
    "identity": Identity,
    "I": lambda: SecondMoment("adagrad"),
    "II": lambda: SecondMoment("rmsprop", beta=0.9),
    "III": lambda: SecondMoment("adam", beta=0.9),
    "newton-schulz": lambda: NewtonSchulz(momentum=0.8),
    "nesterov": lambda: NewtonSchulz(momentum=0.8, nesterov=True, aspect_scaling=True),
}


@pytest.mark.parametrize("make", PRECONDITIONERS.values(), ids=PRECONDITIONERS)
def test_pisa_is_the_optimizer(make: Callable[[], Preconditioner]) -> None:
    settings = {"sigma": 4.0, "rho": 2.0, **ALL}
    assert_equals_optimizer(
        PISA(preconditioner=make(), **settings),
        lambda params, weights: torchpisa.PISA(
            params, make(), batches=5, weights=weights, **settings
        ),
        matrices,
        some,
        # Near its fixed point orthogonalisation turns rounding into whole steps, so that two runs
        # drift apart by half a digit per round.
        rounds=12 if isinstance(make(), NewtonSchulz) else 20,
    )


@pytest.mark.parametrize("curvature", ["hessian", "gauss_newton"])
def test_pisa_with_second_order_information_is_the_optimizer(curvature: Any) -> None:
    settings = {"sigma": 1.0, "rho": 1.0, **ALL}
    hessian = Hessian(curvature, solver="dense")
    assert_equals_optimizer(
        PISA(preconditioner=Hessian(curvature, solver="dense"), **settings),
        lambda params, weights: torchpisa.PISA(
            params, hessian, batches=5, weights=weights, **settings
        ),
        logistic,
        some,
        hessian,
    )


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_a_round_with_nobody_moves_nothing(name: str, batched: bool) -> None:
    """But it counts: gamma and lr_decay go on."""
    schedule: Schedule = lambda iteration: [] if iteration == 3 else range(5)  # noqa: E731
    simulation = simulate(MAKERS[name](), 3, participation=schedule, batched=batched)
    server = copy.deepcopy(simulation.server)
    memory, counts = copy.deepcopy(memories(simulation)), copy.copy(simulation.counts)
    simulation.round()
    assert simulation.iteration == 4
    for before, after in ((server.weights, simulation.server.weights),):
        assert all(torch.equal(before[key], after[key]) for key in before)
    for kind, tensors in server.memory.items():
        assert all(torch.equal(t, simulation.server.memory[kind][k]) for k, t in tensors.items())
    for old, new in zip(memory, memories(simulation), strict=True):
        for kind, tensors in old.items():
            assert all(torch.equal(t, new[kind][key]) for key, t in tensors.items())
    assert simulation.counts == counts
    simulation.round()
    if name in ("SISA", "PISA"):
        assert simulation.server.numbers["sigma"] == pytest.approx(4.0 / 0.98**5, rel=1e-14)
    if name == "Scaffold":
        assert simulation.server.numbers["lr"] == pytest.approx(0.1 * 0.97**4, rel=1e-14)


# The baselines, as their papers print them


def gradient_at(model: nn.Module, x: Tensor, y: Tensor, decay: float) -> Tensors:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return {
        name: w.grad.clone() + decay * w.detach()  # type: ignore[union-attr]
        for name, w in model.named_parameters()
    }


def local_sgd(
    algorithm: Any, model: nn.Module, i: int, iteration: int, mu: float = 0.0
) -> nn.Module:
    """Return the client's model after torch's SGD; FedProx adds its term to the loss."""
    x, y = classes()[i]
    local_model = copy.deepcopy(model)
    start = parameters(model)
    lr = algorithm.lr * algorithm.lr_decay**iteration
    opt = torch.optim.SGD(
        local_model.parameters(),
        lr,
        momentum=algorithm.momentum,
        weight_decay=algorithm.weight_decay,
    )
    for index in algorithm.local.plan(len(y), (0, str(i)), iteration):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(local_model(x[index]), y[index])
        for name, w in local_model.named_parameters():
            loss = loss + mu / 2 * (w - start[name]).square().sum()
        loss.backward()
        opt.step()
    return local_model


def literal_averaging(
    algorithm: Any, rounds: int, schedule: Schedule, mu: float = 0.0
) -> nn.Module:
    """Run FedAvg (McMahan et al., 2017, Algorithm 1) or FedProx (Li et al., 2020, Algorithm 2)."""
    model = mlp()
    sizes = [len(y) for _, y in classes()]
    for iteration in range(rounds):
        present = schedule(iteration)
        if not present:
            continue
        ends = {i: parameters(local_sgd(algorithm, model, i, iteration, mu)) for i in present}
        n = sum(sizes[i] for i in present)
        with torch.no_grad():
            for name, w in model.named_parameters():
                mean = sum(sizes[i] / n * ends[i][name] for i in present)
                w += algorithm.server_lr * (mean - w)
    return model


def literal_fednova(algorithm: Any, rounds: int, schedule: Schedule) -> nn.Module:
    """Run Wang et al. (2020), equation (3): d_i = G_i a_i / |a_i|, with all gradients kept.

    For SGD with momentum a_i = [1 - rho^tau, 1 - rho^(tau - 1), ..., 1 - rho] / (1 - rho).
    """
    model = mlp()
    sizes = [len(y) for _, y in classes()]
    rho = algorithm.momentum
    for iteration in range(rounds):
        present = schedule(iteration)
        if not present:
            continue
        lr = algorithm.lr * algorithm.lr_decay**iteration
        n = sum(sizes[i] for i in present)
        tau_eff, directions = 0.0, []
        for i in present:
            x, y = classes()[i]
            local_model = copy.deepcopy(model)
            opt = torch.optim.SGD(local_model.parameters(), lr, momentum=rho)
            gradients = []
            for index in algorithm.local.plan(len(y), (0, str(i)), iteration):
                grad = gradient_at(local_model, x[index], y[index], algorithm.weight_decay)
                gradients.append(grad)
                for name, w in local_model.named_parameters():
                    w.grad = grad[name]
                opt.step()
            tau = len(gradients)
            a = [(1 - rho ** (tau - k)) / (1 - rho) for k in range(tau)]
            p = sizes[i] / n
            tau_eff += p * sum(a)
            directions.append(
                {
                    name: p
                    * sum(a_k * g[name] for a_k, g in zip(a, gradients, strict=True))
                    / sum(a)
                    for name in grad
                }
            )
        with torch.no_grad():
            for name, w in model.named_parameters():
                w -= algorithm.server_lr * tau_eff * lr * sum(d[name] for d in directions)
    return model


def literal_scaffold(algorithm: Any, rounds: int, schedule: Schedule) -> nn.Module:
    """Run Karimireddy et al. (2020), Algorithm 1, Option II, with clients weighted by size."""
    model = mlp()
    alphas = shares(classes())
    c = {name: torch.zeros_like(w) for name, w in parameters(model).items()}
    c_i = [dict(c) for _ in alphas]
    for iteration in range(rounds):
        present = schedule(iteration)
        if not present:
            continue
        lr = algorithm.lr * algorithm.lr_decay**iteration
        start = parameters(model)
        ends, changes = {}, {}
        for i in present:
            x, y = classes()[i]
            local_model = copy.deepcopy(model)
            plan = algorithm.local.plan(len(y), (0, str(i)), iteration)
            for index in plan:
                grad = gradient_at(local_model, x[index], y[index], algorithm.weight_decay)
                with torch.no_grad():
                    for name, w in local_model.named_parameters():
                        w -= lr * (grad[name] - c_i[i][name] + c[name])
            ends[i] = parameters(local_model)
            new = {
                name: c_i[i][name] - c[name] + (start[name] - ends[i][name]) / (len(plan) * lr)
                for name in c
            }
            changes[i] = {name: new[name] - c_i[i][name] for name in c}
            c_i[i] = new
        share = sum(alphas[i] for i in present)
        with torch.no_grad():
            for name, w in model.named_parameters():
                moved = sum(alphas[i] / share * (ends[i][name] - start[name]) for i in present)
                w += algorithm.server_lr * moved
        c = {name: c[name] + sum(alphas[i] * changes[i][name] for i in present) for name in c}
    return model


# Plain with steps that differ in number between clients, then everything with every kind of work.
PLAIN: dict[str, Any] = {"lr": 0.2}
RATES: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.05, "server_lr": 0.7, "lr_decay": 0.9}
EPOCH = Epochs(1, batch_size=4)
WORK_OF_BASELINES = pytest.mark.parametrize(
    ("settings", "local"),
    [
        (PLAIN, EPOCH),
        (RATES, EPOCH),
        (RATES, Minibatches(steps=3, batch_size=5)),
        (RATES, FullGradient(steps=2)),
    ],
    ids=["plain", "epochs", "minibatches", "full gradients"],
)


def momentum(settings: dict[str, Any]) -> float:
    """Return the momentum, which Scaffold does not have."""
    return 0.0 if settings is PLAIN else 0.5


def assert_equals_literal(algorithm: Algorithm, literal: nn.Module, rounds: int) -> None:
    assert distance(parameters(mlp()), parameters(literal)) > 0.01
    for batched in (False, True):
        simulation = simulate(algorithm, rounds, participation=some, batched=batched)
        assert distance(parameters(simulation.model), parameters(literal)) <= 1e-12


@WORK_OF_BASELINES
def test_fedavg(settings: dict[str, Any], local: Any) -> None:
    algorithm = FedAvg(local=local, momentum=momentum(settings), **settings)
    assert_equals_literal(algorithm, literal_averaging(algorithm, 8, some), 8)


@WORK_OF_BASELINES
def test_fedprox(settings: dict[str, Any], local: Any) -> None:
    algorithm = FedProx(local=local, mu=0.8, momentum=momentum(settings), **settings)
    assert_equals_literal(algorithm, literal_averaging(algorithm, 8, some, mu=0.8), 8)


@WORK_OF_BASELINES
def test_fednova(settings: dict[str, Any], local: Any) -> None:
    algorithm = FedNova(local=local, momentum=momentum(settings), **settings)
    assert_equals_literal(algorithm, literal_fednova(algorithm, 8, some), 8)


@WORK_OF_BASELINES
def test_scaffold(settings: dict[str, Any], local: Any) -> None:
    algorithm = Scaffold(local=local, **settings)
    assert_equals_literal(algorithm, literal_scaffold(algorithm, 8, some), 8)


def test_fedavg_with_one_full_gradient_is_gradient_descent_on_all_data() -> None:
    model = mlp()
    x, y = (torch.cat(column) for column in zip(*classes(), strict=True))
    for _ in range(10):
        grad = gradient_at(model, x, y, 0.0)
        with torch.no_grad():
            for name, w in model.named_parameters():
                w -= 0.3 * grad[name]
    simulation = simulate(FedAvg(lr=0.3, local=FullGradient()), 10)
    assert distance(parameters(simulation.model), parameters(model)) <= 1e-12


def test_fedprox_without_its_term_is_fedavg() -> None:
    prox, average = FedProx(lr=0.1, mu=0.0, momentum=0.5), FedAvg(lr=0.1, momentum=0.5)
    ends = [simulate(algorithm, 5).server.weights for algorithm in (prox, average)]
    assert distance(*ends) <= 1e-14


# Several local steps of the PISA family


@pytest.mark.parametrize("moment", [False, True])
def test_local_steps_of_pisa_minimise_the_augmented_lagrangian(moment: bool) -> None:
    r"""Each is a preconditioned gradient step on F_i(w_i) + <pi_i, w_i - w> + sigma/2 |w_i - w|^2,
    from w_i = w; the dual moves once, by sigma (w_i - w); the server as in the paper."""
    sigma, rho, beta, decay = 3.0, 1.0, 0.9, 0.05
    chosen: Preconditioner = SecondMoment("rmsprop", beta=beta) if moment else Identity()
    algorithm = PISA(
        preconditioner=chosen,
        sigma=sigma,
        rho=rho,
        weight_decay=decay,
        local=FullGradient(steps=4),
    )
    model, alphas = mlp(), shares(classes())
    pi = [{name: torch.zeros_like(w) for name, w in parameters(model).items()} for _ in alphas]
    second = copy.deepcopy(pi)
    for iteration in range(9):
        w, ends = parameters(model), {}
        for i in some(iteration):
            x, y = classes()[i]
            local_model = copy.deepcopy(model)
            for _ in range(4):
                local_model.zero_grad()
                lagrangian = nn.functional.cross_entropy(local_model(x), y)
                for name, w_i in local_model.named_parameters():
                    apart = w_i - w[name]
                    lagrangian = (
                        lagrangian
                        + decay / 2 * w_i.square().sum()
                        + (pi[i][name] * apart).sum()
                        + sigma / 2 * apart.square().sum()
                    )
                lagrangian.backward()
                with torch.no_grad():
                    for name, w_i in local_model.named_parameters():
                        slope = w_i.grad
                        assert slope is not None
                        new = beta * second[i][name] + (1 - beta) * slope.square()
                        second[i][name] = new
                        w_i -= slope / (sigma + rho * (new.sqrt() if moment else 1.0))
            ends[i] = parameters(local_model)
        if not ends:
            continue
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                total = torch.zeros_like(w[name])
                for i, alpha in enumerate(alphas):
                    if i in ends:
                        pi[i][name] = pi[i][name] + sigma * (ends[i][name] - w[name])
                    total += alpha * (sigma * ends.get(i, w)[name] + pi[i][name])
                parameter.copy_(total / sigma)
    for batched in (False, True):
        simulation = simulate(algorithm, 9, participation=some, batched=batched)
        assert distance(parameters(simulation.model), parameters(model)) <= 1e-12


# Where they converge to


def error_on_least_squares(algorithm: Algorithm, rounds: int, participation: float = 1.0) -> float:
    clients = least_squares()
    simulation = simulate(
        algorithm,
        rounds,
        straight,
        clients,
        loss=half_square,
        participation=participation,
    )
    return distance(simulation.server.weights, {"weight": optimum(clients)})


def test_the_problem_is_hard_enough() -> None:
    """Clients disagree by more than the solution is long, and no weighting but that by size has
    the optimum as its solution."""
    clients = least_squares()
    best = optimum(clients)
    optima = [torch.linalg.lstsq(x, y).solution.T for x, y in clients]
    assert max(float((w - best).norm() / best.norm()) for w in optima) > 1
    unweighted = [(x / len(x) ** 0.5, y / len(x) ** 0.5) for x, y in clients]
    assert (optimum(unweighted) - best).norm() > 0.1 * best.norm()


@pytest.mark.parametrize(("steps", "participation"), [(1, 1.0), (5, 0.4)])
@pytest.mark.parametrize("name", ["SISA", "Identity", "Hessian", "MISA", "LocalMISA"])
def test_the_pisa_family_finds_the_optimum(name: str, steps: int, participation: float) -> None:
    local = FullGradient(steps=steps)
    algorithm: Algorithm
    if name == "SISA":
        algorithm = SISA(sigma=4.0, rho=0.5, local=local)
    elif name == "Identity":
        algorithm = PISA(preconditioner=Identity(), sigma=4.0, rho=2.0, local=local)
    elif name == "MISA":
        algorithm = MISA(sigma=4.0, rho=0.5, momentum=0.5, method="svd", local=local)
    elif name == "LocalMISA":
        algorithm = LocalMISA(sigma=6.0, rho=0.5, momentum=0.8, method="svd", local=local)
    else:
        algorithm = PISA(preconditioner=Hessian(), sigma=3.0, rho=1.0, local=local)
    rounds = 150 if name == "LocalMISA" else 120
    assert error_on_least_squares(algorithm, rounds, participation) <= 1e-8


def test_scaffold_finds_the_optimum() -> None:
    algorithm = Scaffold(lr=0.1, local=FullGradient(steps=5))
    assert error_on_least_squares(algorithm, 120, participation=0.4) <= 1e-8


@pytest.mark.parametrize("batched", [True, False])
def test_scaffold_at_a_rate_of_zero(batched: bool) -> None:
    """A warm-up that begins at zero is a round later, and a rate may fall below all numbers."""
    local = FullGradient(steps=2)
    warming = Scaffold(lr=0.1, lr_decay=lambda iteration: min(iteration, 1), local=local)
    later = simulate(warming, 4, batched=batched)
    plain = simulate(Scaffold(lr=0.1, local=local), 3, batched=batched)
    assert distance(later.server.weights, plain.server.weights) <= 1e-14
    vanishing = Scaffold(lr=0.1, lr_decay=1e-30, local=local)
    single = [(x.float(), y) for x, y in classes()]
    still = simulate(vanishing, 4, lambda: mlp().float(), single, batched=batched)
    for tensors in (still.server.weights, still.server.memory["control"]):
        assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_a_movement_at_a_rate_of_zero_implies_no_control() -> None:
    algorithm = Scaffold(lr=0.1, lr_decay=lambda iteration: 0.0)
    server = algorithm.open(algorithm.start({"w": torch.zeros(2)}))
    still = Message({"moved": {"w": torch.zeros(2)}, "control": {"w": torch.zeros(2)}}, {})
    known = {"control": {"w": torch.ones(2)}}
    standing = algorithm.standing(server, still, known, torch.tensor(3.0))
    assert all(torch.equal(tensors["w"], torch.ones(2)) for tensors in standing.values())


def test_fedavg_does_not() -> None:
    """Its fixed point depends on the number of local steps; more rounds do not help."""
    algorithm = FedAvg(lr=0.1, local=FullGradient(steps=5))
    assert error_on_least_squares(algorithm, 100) > 0.05
    assert error_on_least_squares(FedAvg(lr=0.5, local=FullGradient()), 60) <= 1e-8


def test_fednova_corrects_for_unequal_numbers_of_steps() -> None:
    """Clients take 1 to 5 steps in an epoch, and FedAvg favours those that take more."""
    errors = [
        # With small steps what remains of FedNova's error is the drift of the clients.
        error_on_least_squares(make(lr=0.02, local=Epochs(1, batch_size=6)), 70)
        for make in (FedAvg, FedNova)
    ]
    assert errors[0] > 0.2
    assert errors[1] < 0.03


# What the server keeps


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["SISA", "MISA", "PISA", "Scaffold"])
def test_the_server_keeps_the_weighted_sum_of_the_clients_memory(name: str, batched: bool) -> None:
    kind = "control" if name == "Scaffold" else "dual"
    # Rounds 4 and 6 are those with nobody and with one client alone.
    simulation = simulate(MAKERS[name](local=EPOCH), 8, participation=some, batched=batched)
    total = weighted_sum(memories(simulation), kind, shares(classes()))
    assert distance(simulation.server.memory[kind], total) <= 1e-12


@pytest.mark.parametrize("name", ["SISA", "PISA", "Scaffold"])
def test_a_client_that_joins_late(name: str) -> None:
    """The sum then has the new weights, and the run ends at the optimum of all data."""
    algorithm: Algorithm = {
        "SISA": SISA(sigma=4.0, rho=0.5),
        "PISA": PISA(preconditioner=Identity(), sigma=4.0, rho=2.0),
        "Scaffold": Scaffold(lr=0.1, local=FullGradient(steps=5)),
    }[name]
    clients = least_squares()
    late = clients.pop(2)
    kind = "control" if name == "Scaffold" else "dual"
    hand = ByHand(algorithm, straight(), clients, half_square)
    for iteration in range(10):
        hand.round([i for i in range(4) if (iteration + i) % 3])
    hand.join(late)
    everything = [*clients, late]
    total = weighted_sum(hand.memory, kind, shares(everything))
    assert distance(hand.server.memory[kind], total) <= 1e-12
    for iteration in range(150):
        hand.round([i for i in range(5) if (iteration + i) % 3])
    total = weighted_sum(hand.memory, kind, shares(everything))
    best = optimum(everything)
    # The sums tend to zero, so they are compared with what they are sums of.
    largest = max(float(t.norm()) for memory in hand.memory for t in memory[kind].values())
    assert float((hand.server.memory[kind]["weight"] - total["weight"]).norm()) <= 1e-12 * largest
    assert distance(hand.server.weights, {"weight": best}) <= 1e-8
    assert (best - optimum(clients)).norm() > 0.05 * best.norm()


@pytest.mark.parametrize("name", MAKERS)
def test_a_simulation_is_the_round_that_the_algorithm_describes(name: str) -> None:
    algorithm = MAKERS[name](local=Epochs(1, batch_size=4))
    hand = ByHand(algorithm, mlp(), classes(), cross)
    for iteration in range(6):
        hand.round([i for i in range(5) if (iteration + i) % 3])
    schedule: Schedule = lambda k: [i for i in range(5) if (k + i) % 3]  # noqa: E731
    simulation = simulate(algorithm, 6, participation=schedule, batched=False)
    assert distance(simulation.server.weights, hand.server.weights) <= 1e-14


@pytest.mark.parametrize(("local", "batched"), [(FullGradient(steps=2), False), (EPOCH, True)])
@pytest.mark.parametrize("name", MAKERS)
def test_single_precision_stays(name: str, local: Any, batched: bool) -> None:
    """Counters and step sizes are in float64; nothing else may become so."""
    clients: list[Pair] = [(x.float(), y) for x, y in classes()]
    algorithm = MAKERS[name](local=local)
    single = simulate(algorithm, 4, lambda: mlp().float(), clients, batched=batched)
    server = single.server
    for tensors in (server.weights, *server.memory.values()):
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    for memory in memories(single):
        kinds = {
            tensor.dtype for kind in memory.keys() - {"step"} for tensor in memory[kind].values()
        }
        assert kinds <= {torch.float32}
    double = simulate(algorithm, 4)
    assert distance(server.weights, double.server.weights) <= 1e-5


# Arguments

Case = tuple[Callable[..., Any], str, Any, str]
RANGES: list[Case] = [
    (SISA, "sigma", 0.0, "a finite number > 0"),
    (SISA, "sigma", math.inf, "a finite number > 0"),
    (SISA, "sigma", math.nan, "a finite number > 0"),
    (SISA, "rho", -1.0, "a finite number >= 0"),
    (SISA, "gamma", 0.0, "in (0, 1]"),
    (SISA, "gamma", 1.1, "in (0, 1]"),
    (SISA, "weight_decay", -0.1, "a finite number >= 0"),
    (SISA, "consensus_decay", -0.1, "a finite number >= 0"),
    (SISA, "scheme", "sgd", "one of 'adagrad', 'rmsprop', 'adam'"),
    (SISA, "beta", 1.0, "in (0, 1)"),
    (SISA, "eta", 0.0, "a number > 0"),
    (SISA, "eps", -1e-8, "a finite number >= 0"),
    (partial(SISA, rho=None), "sigma", 0.0, "a finite number > 0"),
    (partial(SISA, sigma=None), "rho", -1.0, "a finite number >= 0"),
    (partial(SISA, sigma=None, rho=None), "beta", 1.0, "in (0, 1)"),
    (partial(PISA, preconditioner=Identity(), rho=1.0), "sigma", None, "a finite number > 0"),
    (MISA, "sigma", 0.0, "a finite number > 0"),
    (MISA, "rho", None, "a finite number >= 0"),
    (MISA, "rho", 0.0, "a finite number > 0"),
    (MISA, "damping", 0.0, "a finite number > 0"),
    (LocalMISA, "momentum", -0.1, "in [0, 1)"),
    (SISA, "lr", -1.0, "a finite number >= 0"),
    (MISA, "momentum", 1.0, "in [0, 1)"),
    (MISA, "method", "fast", "one of 'auto', 'svd', 'gram', 'polar', 'smooth'"),
    (FedAvg, "lr", 0.0, "a finite number > 0"),
    (FedAvg, "lr", math.inf, "a finite number > 0"),
    (FedAvg, "momentum", 1.0, "in [0, 1)"),
    (FedAvg, "momentum", -0.1, "in [0, 1)"),
    (FedAvg, "weight_decay", -1.0, "a finite number >= 0"),
    (FedAvg, "server_lr", 0.0, "a finite number > 0"),
    (FedAvg, "lr_decay", 0.0, "in (0, 1]"),
    (FedAvg, "lr_decay", 1.5, "in (0, 1]"),
    (FedProx, "mu", -0.1, "a finite number >= 0"),
    (FedProx, "momentum", 1.0, "in [0, 1)"),
    (FedNova, "momentum", 1.0, "in [0, 1)"),
    (Scaffold, "lr", -1.0, "a finite number > 0"),
    (Scaffold, "server_lr", math.nan, "a finite number > 0"),
]


@pytest.mark.parametrize(("make", "name", "value", "legal"), RANGES)
def test_messages_name_argument_value_and_range(
    make: Callable[..., Any], name: str, value: Any, legal: str
) -> None:
    of_pisa = make in (SISA, MISA, LocalMISA) or isinstance(make, partial)
    needed = {} if of_pisa else {"lr": 0.1}
    with pytest.raises(ValueError, match=re.escape(f"{name} must be {legal}, got {value!r}")):
        make(**{**needed, name: value})


@pytest.mark.parametrize("name", ["sigma", "rho", "gamma", "weight_decay", "consensus_decay"])
def test_pisa_checks_as_sisa_does(name: str) -> None:
    settings = {"preconditioner": Identity(), "sigma": 1.0, "rho": 1.0, name: -1.0}
    with pytest.raises(ValueError, match=rf"{name} must be .*, got -1.0"):
        PISA(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make", [SISA, partial(SISA, sigma=None, rho=None), MISA, partial(MISA, sigma=1.0), LocalMISA]
)
def test_a_learning_rate_of_adamw(make: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match=r"lr=0\.004 is relative here: .* 1 / rho") as warned:
        make(lr=4e-3)
    assert [warning.filename for warning in warned] == [__file__]


def test_preconditioner_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"preconditioner must be .*, got 'adam'"):
        PISA(preconditioner="adam", sigma=1.0, rho=1.0)  # type: ignore[arg-type]


def test_local_work_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"local must be .*, got 5"):
        SISA(local=5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"local must be .*, got <class '.*Epochs'>"):
        SISA(local=Epochs)  # type: ignore[arg-type]


def test_newton_schulz_refuses_vectors() -> None:
    """As the optimizer does; the message is about the parameter, not about a dimension."""
    algorithm = PISA(preconditioner=NewtonSchulz(), sigma=4.0, rho=1.0)
    with pytest.raises(ValueError, match=r"params must be real matrices for NewtonSchulz"):
        simulate(algorithm, 1, mlp)


def test_rule_for_gamma_out_of_range() -> None:
    algorithm = SISA(gamma=lambda iteration: 1.0 if iteration < 2 else 1.5)
    simulation = simulate(algorithm, 2)
    with pytest.raises(ValueError, match=re.escape("gamma must be in (0, 1], got 1.5")):
        simulation.round()
