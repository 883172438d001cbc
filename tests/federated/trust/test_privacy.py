"""Differential privacy: noise that keeps the sums right, and what it adds up to."""

import math
import random
from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

from tests.federated.problems import (
    half_square,
    least_squares,
    memories,
    optimum,
    shares,
    straight,
    weighted_sum,
)
from torchpisa.federated import (
    MISA,
    SISA,
    FedADMM,
    FedAvg,
    FullGradient,
    GaussianNoise,
    RobustSelection,
    Scaffold,
    Simulation,
)
from torchpisa.federated.algorithms.base import Message
from torchpisa.federated.trust.privacy import PrivacyAccount

opacus = pytest.importorskip("opacus")
from opacus.accountants import PRVAccountant  # noqa: E402

DELTA = 1e-5


def exact_epsilon(multiplier: float, delta: float) -> float:
    """Return the epsilon of one Gaussian mechanism (Balle and Wang, 2018, Theorem 8)."""

    def cdf(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def reached(epsilon: float) -> float:
        a, b = 1 / (2 * multiplier), epsilon * multiplier
        return cdf(a - b) - math.exp(epsilon) * cdf(-a - b)

    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(("noise", "rounds"), [(0.5, 1), (1.0, 30), (2.0, 10), (20.0, 3)])
def test_epsilon_is_that_of_the_closed_form(noise: float, rounds: int) -> None:
    """Rounds of nine equal clients are one Gaussian mechanism; the accountant is an upper bound."""
    account = PrivacyAccount(GaussianNoise(1.0, noise, DELTA))
    for _ in range(rounds):
        account.add({str(i): 1 / 9 for i in range(9)})
    exact = exact_epsilon(3 * noise / math.sqrt(rounds), DELTA)
    assert exact <= account.epsilon <= 1.2 * exact + 1e-3


def test_epsilon_is_that_of_a_second_accountant() -> None:
    account = PrivacyAccount(GaussianNoise(1.0, 0.5, DELTA))
    other = PRVAccountant()
    for _ in range(8):
        account.add({str(i): 0.1 for i in range(16)})
    other.history = [(0.5 * 4, 1 - 1e-9, 8)]  # it takes no rate of exactly one
    numerical = other.get_epsilon(DELTA)
    assert 0.98 * numerical <= account.epsilon <= 1.2 * numerical


def test_sensitivity_is_the_share_times_the_clip() -> None:
    """However large an update: leaving it out changes the sum by alpha_i clip at most."""
    privacy = GaussianNoise(2.0, 0.0)
    sizes = (5, 50, 20)
    for i, n in enumerate(sizes):
        update = Message({"delta": {"w": 1e3 * torch.randn(40, dtype=torch.float64)}}, {})
        sent = privacy.apply(update).tensors["delta"]["w"]
        alpha = n / sum(sizes)
        assert float((alpha * sent).norm()) == pytest.approx(alpha * privacy.clip)
        # The noise multiplier that is counted is noise of the sum over that sensitivity.
        account = PrivacyAccount(replace(privacy, noise=0.7))
        account.add({str(j): m / sum(sizes) for j, m in enumerate(sizes)})
        deviation = 0.7 * privacy.clip * math.sqrt(sum((m / sum(sizes)) ** 2 for m in sizes))
        multiplier = deviation / (alpha * privacy.clip)
        assert account.spent[str(i)] == pytest.approx(multiplier**-2)


def test_only_those_who_take_part_spend() -> None:
    account = PrivacyAccount(GaussianNoise(1.0, 1.0))
    assert account.epsilon == 0
    account.add({"a": 0.5, "b": 0.5})
    account.add({"a": 0.5})
    assert account.spent == pytest.approx({"a": 1.5, "b": 0.5})
    none = PrivacyAccount(GaussianNoise(1.0, 0.0))
    none.add({"a": 1.0})
    assert none.epsilon == math.inf


def test_noise_for_an_epsilon_gives_that_epsilon() -> None:
    privacy = GaussianNoise.for_epsilon(3.0, clip=0.5, rounds=40, clients=25, delta=1e-4)
    account = PrivacyAccount(privacy)
    for _ in range(40):
        account.add({str(i): 1 / 25 for i in range(25)})
    assert 0.98 * 3.0 <= account.epsilon <= 3.0 * 1.001
    with pytest.raises(ValueError, match="epsilon must be"):
        GaussianNoise.for_epsilon(0.0, clip=1.0, rounds=1, clients=1)


@pytest.mark.parametrize(
    "algorithm",
    [SISA(sigma=4.0, rho=1.0), MISA(sigma=2.0, rho=1.0), Scaffold(lr=0.1), FedAvg(lr=0.1)],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("batched", [True, False])
def test_the_servers_sum_stays_that_of_its_clients(algorithm, batched) -> None:
    clients = least_squares()
    simulation = Simulation(
        straight(),
        clients,
        algorithm,
        loss=half_square,
        batched=batched,
        participation=0.6,
        privacy=GaussianNoise(0.5, 0.3),
    )
    rows = simulation.run(7, progress=False)
    epsilons = [row["epsilon"] for row in rows]
    assert epsilons[0] == 0
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] > epsilons[1] > 0
    for kind, sums in simulation.server.memory.items():
        total = weighted_sum(memories(simulation), kind, shares(clients))
        for name, tensor in sums.items():
            torch.testing.assert_close(total[name], tensor, rtol=1e-10, atol=1e-12)


def tail(privacy: GaussianNoise, server_noise: float = 0.0, rounds: int = 1200) -> torch.Tensor:
    """Return the errors of the weights after a tenth of a training of SISA."""
    clients = least_squares()
    simulation = Simulation(
        straight(), clients, SISA(sigma=4.0, rho=1.0), loss=half_square, privacy=privacy
    )
    generator = torch.Generator().manual_seed(5)
    errors = []
    for _ in range(rounds):
        simulation.round()
        if server_noise:

            def blur(t: torch.Tensor) -> torch.Tensor:
                noise = torch.randn(t.shape, generator=generator, dtype=t.dtype)
                return t + server_noise * noise

            memory = tree_map(blur, simulation.server.memory)
            simulation.server = replace(simulation.server, memory=memory)
        errors.append(simulation.server.weights["weight"] - optimum(clients))
    return torch.cat(errors[rounds // 10 :])


def test_noise_of_the_clients_is_forgotten_and_that_of_a_server_is_not() -> None:
    """Least squares: the mean is right and the variance stays; or else it grows for good."""
    privacy = GaussianNoise(clip=100.0, noise=1e-4)  # nothing is clipped
    errors = tail(privacy)
    half = len(errors) // 2
    spread = errors.std(0)
    # Noise is correlated from round to round: some 20 rounds count as one.
    assert bool((errors.mean(0).abs() < 4 * spread / math.sqrt(len(errors) / 20)).all())
    assert float(errors[half:].square().mean() / errors[:half].square().mean()) < 1.3
    total = 1e-2 * math.sqrt(sum(a**2 for a in shares(least_squares())))
    drifting = tail(GaussianNoise(clip=100.0, noise=0.0), server_noise=total)
    assert float(drifting[half:].square().mean() / errors.square().mean()) > 20


def test_clipping_slows_down_and_does_not_bias() -> None:
    """The step of a dual is clipped, not a gradient, so the fixed point stays."""
    clients = least_squares()
    simulation = Simulation(
        straight(),
        clients,
        SISA(sigma=4.0, rho=1.0),
        loss=half_square,
        privacy=GaussianNoise(clip=0.2, noise=0.0),
    )
    for _ in range(300):
        simulation.round()
    gap = simulation.server.weights["weight"] - optimum(clients)
    assert float(gap.norm()) < 1e-8


def test_runs_can_be_repeated_and_continued(tmp_path) -> None:
    def simulation() -> Simulation:
        return Simulation(
            straight(),
            least_squares(),
            SISA(sigma=4.0, rho=1.0, local=FullGradient(2)),
            loss=half_square,
            privacy=GaussianNoise(0.5, 0.3),
        )

    whole = simulation().run(6, progress=False)
    simulation().run(3, progress=False, checkpoint=tmp_path / "run.pt")
    rows = simulation().run(6, progress=False, checkpoint=tmp_path / "run.pt")
    assert rows[-1]["epsilon"] == pytest.approx(whole[-1]["epsilon"], rel=1e-12)


def test_secret_noise_has_more_than_the_seeds_of_a_generator(monkeypatch) -> None:
    """PyTorch's generator on the CPU reads 32 bits of its seed, and those are all alike here."""
    source = random.Random(0)
    monkeypatch.setattr("os.urandom", lambda count: (source.randbytes(4) + bytes(4)) * (count // 8))
    update = Message(
        {"dual": {"a": torch.zeros(3, 7), "b": torch.zeros(()), "c": torch.zeros(0)}}, {}
    )
    one, two = (GaussianNoise(1.0, 1.0).apply(update).tensors["dual"] for _ in range(2))
    assert not torch.equal(one["a"], two["a"])
    assert [one[name].shape for name in "abc"] == [(3, 7), (), (0,)]


def test_secret_noise_is_normal(monkeypatch) -> None:
    """By its moments and by its distribution (Kolmogorov and Smirnov), in more than one part."""
    monkeypatch.setattr("os.urandom", random.Random(0).randbytes)
    count = 2**20 + 2**18 + 1
    zero = Message({"dual": {"a": torch.zeros(count, dtype=torch.float64)}}, {})
    noise = GaussianNoise(0.5, 4.0).apply(zero).tensors["dual"]["a"] / 2
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = float((noise**power).mean()) - moment
        assert abs(error) <= 4 * math.sqrt(variance / count)
    reached = torch.arange(1, count + 1, dtype=torch.float64) / count
    gap = (torch.special.ndtr(noise.sort().values) - reached).abs().max()
    assert float(gap) <= 2 / math.sqrt(count)
    neighbours = float((noise[1:] * noise[:-1]).mean())
    assert abs(neighbours) <= 4 / math.sqrt(count)


def test_what_is_refused() -> None:
    clients = least_squares()
    with pytest.raises(TypeError, match="privacy must be a GaussianNoise, got 1"):
        Simulation(straight(), clients, SISA(), privacy=1)  # type: ignore[arg-type]
    privacy = GaussianNoise(1.0, 1.0)
    with pytest.raises(ValueError, match="privacy must be None with robust"):
        Simulation(straight(), clients, SISA(), privacy=privacy, robust=RobustSelection())
    with pytest.raises(ValueError, match="whose updates can be clipped, got FedADMM"):
        Simulation(straight(), clients, FedADMM(lr=0.1, rho=1.0), privacy=privacy)
    with pytest.raises(ValueError, match=r"got SISA: .* or decides sigma"):
        Simulation(straight(), clients, SISA(sigma=None), privacy=privacy)
    with pytest.raises(ValueError, match="delta must be"):
        GaussianNoise(1.0, 1.0, delta=1.0)
    with pytest.raises(ValueError, match=r"delta must be in \(0, 1\), got 0"):
        GaussianNoise.for_epsilon(3.0, clip=1.0, rounds=10, clients=10, delta=0)
