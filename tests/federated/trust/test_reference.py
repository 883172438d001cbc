"""Reference data: what a mixture of them explains, and who is believed."""

import numpy as np
import pytest
import torch
from scipy.optimize import nnls
from torch import nn

from benchmarks.attacks import LIES, corrupt
from tests.federated.problems import distance, half_square, seeded, straight
from torchpisa.federated import SISA, FedAvg, FullGradient, Reference, RobustSelection, Simulation
from torchpisa.federated.trust.reference import unexplained

LABELS = 4


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points around a centre for each label."""
    centres = 3 * torch.randn(LABELS, 12, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % LABELS
    return centres[y] + torch.randn(count, 12, generator=generator), y


def test_it_is_the_distance_from_a_cone() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 30, generator=generator, dtype=torch.float64) + 0.5
    points = torch.randn(9, 30, generator=generator, dtype=torch.float64) + 0.3
    points[0], points[1] = rows[2] + 3 * rows[4], -rows.sum(0)
    expected = [nnls(rows.T.numpy(), p.numpy())[1] / np.linalg.norm(p.numpy()) for p in points]
    found, mixtures = unexplained(points, rows)
    torch.testing.assert_close(
        mixtures[0], torch.tensor([0, 0, 1, 0, 3, 0.0], dtype=torch.float64), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert found[0] < 1e-4
    assert found[1] > 0.9
    assert unexplained(torch.zeros(1, 30, dtype=torch.float64), rows)[0].tolist() == [0.0]


@pytest.mark.parametrize(
    "algorithm",
    [SISA(sigma=2.0, rho=1.0), FedAvg(lr=0.3, local=FullGradient())],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("flipped", [True, False])
def test_a_label_of_ones_own_is_believed_and_a_wrong_one_is_not(algorithm, flipped) -> None:
    """Client 0 is the only one with label 0, or with samples of label 0 that it calls 1."""
    inputs, targets = samples(240, 1)
    data = [(inputs[targets == 0], targets[targets == 0] + flipped)]
    for part in range(6):
        rows = (targets != 0) & (torch.arange(240) // 40 == part)
        data.append((inputs[rows], targets[rows]))
    model = seeded(lambda: nn.Linear(12, LABELS)).float()
    reference = Reference(model, *samples(40, 2))
    robust = RobustSelection(reference=reference, patience=2, response=-float("inf"))
    simulation = Simulation(model, data, algorithm, robust=robust)
    rejected = []
    for _ in range(10):
        simulation.round()
        rejected += [*simulation.rejected]
    assert rejected == ([0] * 10 if flipped else [])
    if flipped:
        assert "cannot be explained by the reference data" in simulation.rejected[0]


@pytest.mark.parametrize("story", ["scaling", "honest"])
def test_multiples_of_the_truth_are_found(story) -> None:
    """Also of a client whose label nobody else has; as it is, that is believed."""
    inputs, targets = samples(240, 1)
    data = [(inputs[targets == label], targets[targets == label]) for label in range(LABELS)]
    data += [(inputs[i::3], targets[i::3]) for i in range(3)]
    model = seeded(lambda: nn.Linear(12, LABELS)).float()
    robust = RobustSelection(reference=Reference(model, *samples(40, 2)))
    simulation = Simulation(model, data, SISA(sigma=2.0, rho=1.0), robust=robust)
    if story in LIES:
        corrupt(simulation, 0, LIES[story])
    simulation.round()
    assert list(simulation.rejected) == ([0] if story == "scaling" else [])
    if story == "scaling":
        assert "times as large as the reference data explain" in simulation.rejected[0]


def test_witnesses_go_on_from_a_checkpoint(tmp_path) -> None:
    inputs, targets = samples(240, 1)
    data = [(inputs[i::6], (targets[i::6] + (i == 0)) % LABELS) for i in range(6)]
    model = seeded(lambda: nn.Linear(12, LABELS)).float()

    def simulation() -> Simulation:
        robust = RobustSelection(reference=Reference(model, *samples(40, 2)))
        return Simulation(model, data, SISA(sigma=2.0, rho=1.0), robust=robust)

    whole = simulation()
    rows = whole.run(6, progress=False)
    simulation().run(3, progress=False, checkpoint=tmp_path / "run.pt")
    second = simulation()
    second.run(6, progress=False, checkpoint=tmp_path / "run.pt")
    assert distance(second.server.weights, whole.server.weights) == 0
    assert rows[-1]["rejected"] > 0


def test_arguments() -> None:
    x, y = torch.randn(4, 3), torch.randn(4, 1)
    with pytest.raises(ValueError, match=r"kinds must be one integer for each of 4 samples, got"):
        Reference(straight(), x, y, loss=half_square)
    kinds = torch.tensor([0, 0, 1, 1])
    assert [len(y) for _, y in Reference(straight(), x, y, kinds=kinds).data] == [2, 2]
    with pytest.raises(TypeError, match="kinds must be a tensor, got a list"):
        Reference(straight(), x, y, kinds=[0, 0, 1, 1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs and targets must have one length, got 4 and 3"):
        Reference(straight(), x, y[:3], kinds=kinds)
    with pytest.raises(ValueError, match="limit must be"):
        Reference(straight(), x, y, kinds=kinds, limit=2.0)
