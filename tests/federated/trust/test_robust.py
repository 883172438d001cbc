"""Robust selection: the centres, who is rejected, and trainings with a malicious client."""

import re

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.attacks import LIES, corrupt
from tests.federated.problems import (
    classes,
    distance,
    half_square,
    least_squares,
    logistic,
    memories,
    optimum,
    seeded,
    straight,
    weighted_sum,
)
from torchpisa.federated import (
    MISA,
    SISA,
    FedAvg,
    FullGradient,
    LognormalDelay,
    Minibatches,
    RobustSelection,
    Scaffold,
    Simulation,
    Timing,
)
from torchpisa.federated.algorithms.base import Message, ServerState
from torchpisa.federated.trust.robust import Judge, geometric_median, krum

CENTRES = ("median", "trimmed mean", "krum", "geometric median")
SIZES = (30, 40, 35, 50, 30, 45, 35)
LIAR = 3


def cloud(liars: int = 1, count: int = 9, size: int = 40) -> torch.Tensor:
    """Return points around (1, 1, ...), the last ones far away."""
    generator = torch.Generator().manual_seed(0)
    points = 1 + 0.1 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    points[count - liars :] *= -20
    return points


def standings(points: torch.Tensor) -> dict[str, dict[str, dict[str, torch.Tensor]]]:
    """Return points as clients have them, in two tensors."""
    return {
        str(i): {"dual": {"a": point[:10].reshape(2, 5), "b": point[10:]}}
        for i, point in enumerate(points)
    }


def judged(rule: RobustSelection, points: torch.Tensor) -> dict[str, str]:
    """Return who is rejected in a first round, in which nobody has a history."""
    fields = standings(points)
    updates = {name: Message({"delta": point["dual"]}, {}) for name, point in fields.items()}
    server = ServerState({"a": torch.zeros(2, 5), "b": torch.zeros(points.shape[1] - 10)})
    return Judge(rule, SISA()).rejected(server, updates, fields)


def test_krum_is_that_of_its_paper() -> None:
    """Blanchard et al. (2017): the sum over the n - f - 2 closest others, written out."""
    points, liars = cloud(2), 2
    scores = []
    for i, a in enumerate(points):
        squares = sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(points) if j != i)
        scores.append(sum(squares[: len(points) - liars - 2]))
    assert krum(points, liars) == int(np.argmin(scores))


def test_geometric_median_has_unit_vectors_that_cancel() -> None:
    """That is its condition of optimality, unless it is one of the points."""
    points = cloud()
    centre = geometric_median(points)
    away = points - centre
    assert float((away / away.norm(dim=1, keepdim=True)).sum(0).norm()) <= 1e-6
    assert torch.equal(geometric_median(torch.ones(5, 3)), torch.ones(3))


@pytest.mark.parametrize("liars", [1, 2])
@pytest.mark.parametrize("centre", CENTRES)
def test_liars_are_found_and_nobody_else(centre: str, liars: int) -> None:
    rule = RobustSelection(centre, liars=liars)  # type: ignore[arg-type]
    found = judged(rule, cloud(liars))
    assert sorted(found) == [str(i) for i in range(9 - liars, 9)]
    assert all(f"from the {centre} of all" in reason for reason in found.values())
    assert judged(rule, cloud(0)) == {}


@pytest.mark.parametrize("centre", CENTRES)
def test_no_more_than_told_and_nobody_among_few(centre: str) -> None:
    rule = RobustSelection(centre)  # type: ignore[arg-type]
    assert len(judged(rule, cloud(2))) == 1
    assert judged(rule, cloud(1, count=4)) == {}
    assert judged(rule, cloud(1, count=5))


@pytest.mark.parametrize("centre", CENTRES)
def test_what_is_not_finite_is_always_rejected(centre: str) -> None:
    """And it neither hides a liar nor counts as one."""
    rule = RobustSelection(centre)  # type: ignore[arg-type]
    points = cloud(3)
    points[6, 3], points[7, 20] = torch.nan, torch.inf
    found = judged(rule, points)
    assert sorted(found) == ["6", "7", "8"]
    assert [found[name] for name in "67"] == ["it is not finite"] * 2
    assert judged(rule, points[6:8]) == {str(i): "it is not finite" for i in range(2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centre": "mean"}, "centre must be one of 'median', 'trimmed mean', 'krum'"),
        ({"liars": 0}, "liars must be an integer >= 1, got 0"),
        ({"patience": 0}, "patience must be an integer >= 1, got 0"),
        ({"factor": 0.5}, "factor must be a finite number >= 1, got 0.5"),
        ({"response": 1.0}, "response must be in [-inf, 1), got 1.0"),
        ({"count_limit": 0.5}, "count_limit must be a number >= 1, got 0.5"),
    ],
)
def test_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RobustSelection(**options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reference must be a Reference, got 3"):
        RobustSelection(reference=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="robust must be a RobustSelection, got True"):
        Simulation(logistic(), classes(), SISA(), robust=True)  # type: ignore[arg-type]


# Trainings


ALGORITHMS = (
    SISA(sigma=2.0, rho=1.0),
    SISA(sigma=None, rho=None),
    MISA(sigma=1.0, rho=2.0, momentum=0.5),
    FedAvg(lr=0.3, local=FullGradient()),
    Scaffold(lr=0.2, local=FullGradient(2)),
)
ONLY_RESPONSE = RobustSelection(factor=1e9)  # no test of distance


def wide() -> nn.Module:
    return seeded(lambda: nn.Linear(40, 3))


def training(algorithm, lie=None, robust=None, rounds=12, **options) -> Simulation:
    """Return a training of seven clients with data of their own kinds, one of them a liar."""
    simulation = Simulation(wide(), classes(SIZES, (40,)), algorithm, robust=robust, **options)
    if lie is not None:
        corrupt(simulation, LIAR, lie)
    for _ in range(rounds):
        simulation.round()
    return simulation


@pytest.mark.parametrize("story", ["sign flip", "replay"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_a_client_that_does_not_respond_is_found_and_nobody_else(algorithm, story) -> None:
    """Clients differ in kind, so that their updates do; responses do not."""
    simulation = training(algorithm, LIES[story], ONLY_RESPONSE, 0)
    found = []
    for _ in range(13):
        simulation.round()
        found.append([*simulation.rejected])
        assert all("response to the movement" in why for why in simulation.rejected.values())
    assert found[:3] == [[]] * 3  # two responses after the first are needed to tell
    assert all(clients in ([], [LIAR]) for clients in found)
    assert found[6:] == [[LIAR]] * 7


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("local", ["full", "noisy"])
def test_nobody_honest_is_rejected_by_response(algorithm, local) -> None:
    if local == "noisy":
        algorithm = type(algorithm)(
            **{**vars(algorithm), "local": Minibatches(steps=2, batch_size=2)}
        )
    simulation = training(algorithm, None, ONLY_RESPONSE, rounds=30)
    assert simulation._rejections == 0


def test_the_response_is_that_of_its_definition() -> None:
    """Correlations written out, from updates that are recorded as they arrive."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    simulation = training(SISA(sigma=2.0, rho=1.0), None, ONLY_RESPONSE, rounds=0)

    def record(update, first):
        weights = torch.cat([w.flatten() for w in simulation.server.weights.values()])
        seen.append((weights, torch.cat([d.flatten() for d in update.tensors["delta"].values()])))
        return update

    corrupt(simulation, LIAR, record)
    for _ in range(6):
        simulation.round()
    total = torch.stack([delta for _, delta in seen]).cumsum(0)
    expected = {"update": 0.0, "standing": 0.0}
    for t in range(2, 6):  # the first change is left out
        moved = seen[t][0] - seen[t - 1][0]
        changes = {"update": seen[t][1] - seen[t - 1][1], "standing": total[t] - total[t - 1]}
        for kind, change in changes.items():
            cosine = torch.nn.functional.cosine_similarity(moved, change, dim=0)
            expected[kind] = 0.9 * expected[kind] + float(cosine)
    known = simulation._judge._responses[str(LIAR)]
    assert known.update == pytest.approx(expected["update"], rel=1e-4)
    assert known.standing == pytest.approx(expected["standing"], rel=1e-4)
    assert known.rounds == 4
    assert known.standing / known.weight < -0.3


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("algorithm", ALGORITHMS[:2], ids=lambda a: type(a).__name__)
def test_a_rejected_client_is_absent(algorithm, batched) -> None:
    """Its dual stays where it was and the server's sum is that of its clients."""
    lie = LIES["sign flip"]
    rejected = []
    simulation = training(algorithm, lie, RobustSelection(patience=100), 0, batched=batched)
    for _ in range(8):
        before = simulation.memory_of(LIAR)
        simulation.round()
        rejected.append(LIAR in simulation.rejected)
        if rejected[-1]:
            after = simulation.memory_of(LIAR)
            assert all(
                torch.equal(after[kind][name], tensor)
                for kind, tensors in before.items()
                for name, tensor in tensors.items()
            )
    assert any(rejected)
    # The liar's own memory is not what it sent, so its part is taken from the ledger.
    known = [*memories(simulation)]
    known[LIAR] = simulation._ledger.sums.get(str(LIAR), simulation._initial)
    total = weighted_sum(known, "dual", simulation._alphas.tolist())
    scale = max(float(t.abs().max()) for t in total.values())
    for name, dual in simulation.server.memory["dual"].items():
        torch.testing.assert_close(total[name], dual, rtol=0, atol=1e-10 * scale + 1e-12)


@pytest.mark.parametrize("batched", [True, False])
def test_a_client_with_missing_values_is_absent(batched: bool) -> None:
    clients = classes(SIZES)
    clients[LIAR][0][5] = torch.nan
    simulation = Simulation(logistic(), clients, MISA(), robust=RobustSelection(), batched=batched)
    simulation.run(4, progress=False)
    assert simulation.rejected[LIAR] == "it is not finite"
    assert all(t.isfinite().all() for t in simulation.memory_of(LIAR)["dual"].values())


def test_the_solution_is_that_of_the_others() -> None:
    """Least squares to the last digits: what the liar had contributed leaves the sum, too."""
    clients = least_squares((22, 30, 20, 28, 24, 26, 25), n=10)
    algorithm = SISA(sigma=4.0, rho=1.0)
    robust = RobustSelection(factor=1e9, count_limit=float("inf"))
    simulation = Simulation(straight(10), clients, algorithm, loss=half_square, robust=robust)
    corrupt(simulation, LIAR, LIES["sign flip"])
    for _ in range(600):
        simulation.round()
        assert set(simulation.rejected) <= {LIAR}
    assert str(LIAR) not in simulation._ledger.sums
    others = [data for i, data in enumerate(clients) if i != LIAR]
    gap = (simulation.server.weights["weight"] - optimum(others)).norm() / optimum(others).norm()
    assert float(gap) < 1e-6


def test_honest_clients_train_as_without_a_judge() -> None:
    """To the last digits, at once and in turn; only the order of a sum differs."""
    robust = RobustSelection(factor=1e9, response=-float("inf"), count_limit=float("inf"))
    for batched in (True, False):
        plain = training(ALGORITHMS[0], batched=batched)
        other = training(ALGORITHMS[0], robust=robust, batched=batched)
        assert distance(other.server.weights, plain.server.weights) < 1e-13


def test_numbers_of_samples_are_limited() -> None:
    robust = RobustSelection(count_limit=1.5)
    assert robust.largest_count([10, 12, 1000, 8]) == 15
    clients = classes((10, 10, 100, 10, 10))
    shares = Simulation(logistic(), clients, SISA(), robust=robust)._alphas.tolist()
    assert shares == pytest.approx([10 / 55, 10 / 55, 15 / 55, 10 / 55, 10 / 55])


@pytest.mark.parametrize("timing", [None, Timing(LognormalDelay(1.0, seed=3), deadline=2.0)])
def test_a_run_goes_on_from_its_checkpoint(timing, tmp_path) -> None:
    def simulation() -> Simulation:
        return training(ALGORITHMS[0], LIES["scaling"], RobustSelection(), 0, timing=timing)

    whole = simulation()
    rows = whole.run(14, progress=False)
    first = simulation()
    first.run(7, progress=False, checkpoint=tmp_path / "run.pt")
    second = simulation()
    second.run(14, progress=False, checkpoint=tmp_path / "run.pt")
    assert distance(second.server.weights, whole.server.weights) < 1e-12
    assert second._rejections == whole._rejections == rows[-1]["rejected"] > 0
    other = Simulation(wide(), classes(SIZES, (40,)), ALGORITHMS[0], timing=timing)
    with pytest.raises(ValueError, match="robust must be that of the saved run, Robust"):
        other.run(20, progress=False, checkpoint=tmp_path / "run.pt")


def test_late_updates_are_judged_when_they_arrive() -> None:
    """A rejected one leaves its client with what it had before the round it was made in."""
    timing = Timing(lambda client, iteration: 2.5 if client == LIAR else 1.0, deadline=1.0)
    robust = RobustSelection(patience=100)
    simulation = training(ALGORITHMS[0], LIES["scaling"], robust, 0, timing=timing)
    before = simulation.memory_of(LIAR)
    for expected in ([], [], [LIAR]):
        simulation.round()
        assert list(simulation.rejected) == expected
    after = simulation.memory_of(LIAR)
    assert all(torch.equal(after["dual"][name], t) for name, t in before["dual"].items())
