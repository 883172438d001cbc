"""Robust selection: the centres, and who is rejected."""

import re

import numpy as np
import pytest
import torch

from torchpisa.federated import RobustSelection
from torchpisa.federated.algorithms.robust import geometric_median, krum

CENTRES = ("median", "trimmed mean", "krum", "geometric median")


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
    found = rule.rejected(standings(cloud(liars)))
    assert sorted(found) == [str(i) for i in range(9 - liars, 9)]
    assert all(f"from the {centre} of all" in reason for reason in found.values())
    assert rule.rejected(standings(cloud(0))) == {}


@pytest.mark.parametrize("centre", CENTRES)
def test_no_more_than_told_and_nobody_among_few(centre: str) -> None:
    rule = RobustSelection(centre)  # type: ignore[arg-type]
    assert len(rule.rejected(standings(cloud(2)))) == 1
    assert rule.rejected(standings(cloud(1, count=4))) == {}
    assert rule.rejected(standings(cloud(1, count=5)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centre": "mean"}, "centre must be one of 'median', 'trimmed mean', 'krum'"),
        ({"liars": 0}, "liars must be an integer >= 1, got 0"),
        ({"patience": 0}, "patience must be an integer >= 1, got 0"),
        ({"factor": 0.5}, "factor must be a finite number >= 1, got 0.5"),
    ],
)
def test_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        RobustSelection(**options)  # type: ignore[arg-type]
