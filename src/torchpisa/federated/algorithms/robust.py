r"""Robust selection: updates that are far from a robust centre are not taken.

A client whose update is not taken is absent from the round, and every algorithm has a rule for
that: its dual or control variate stays as it was, on both sides. So whole updates are rejected, and
the server's \(\Pi = \sum_i \alpha_i \pi_i\) stays the sum over its clients. A centre in place of
the sum, as for FedAvg, would break that, and under unlike data move the solution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.federated.algorithms.base import Fields

__all__ = ["RobustSelection"]

Centre = Literal["median", "trimmed mean", "krum", "geometric median"]


@dataclass(frozen=True)
class RobustSelection:
    r"""A limit on how far an update may be from the others.

    What is compared is where an update leaves its client (`Algorithm.standing`): its dual or
    control variate, or for FedAvg and its kin the movement. The distances from a centre that a
    minority cannot move far are compared with their median, and the farthest `liars` clients are
    rejected if they are farther than `factor` times that. Clients count equally, whatever numbers
    of samples they claim.

    This assumes that honest clients are more alike than a liar is. Where every client has data
    of its own kind, as with one label each, nobody can tell.

    Args:
        centre: `"median"` of every coordinate; `"trimmed mean"` of every coordinate, without the
            `liars` smallest and largest; `"krum"`, the client that is closest to its
            n - liars - 2 nearest (Blanchard et al., 2017); or `"geometric median"`, the point
            with the smallest sum of distances (Pillutla et al., 2022).
        liars: clients that are rejected in a round, at most. With fewer than 2 liars + 3
            updates nobody is.
        factor: distance beyond which they are, in units of the median distance.
        patience: a client that is rejected in so many rounds in a row loses what it had
            contributed before, since a dual that was taken once would stay in the sum for good;
            it begins anew.
    """

    centre: Centre = "geometric median"
    liars: int = 1
    factor: float = 2.0
    patience: int = 3

    def __post_init__(self) -> None:
        choices = ("median", "trimmed mean", "krum", "geometric median")
        check_choice("centre", self.centre, choices)
        check_count("liars", self.liars)
        check_range("factor", self.factor, 1, high_open=True)
        check_count("patience", self.patience)

    def rejected(self, standings: Mapping[str, Fields]) -> dict[str, str]:
        """Return why a client is rejected, by client.

        Args:
            standings: `Algorithm.standing` of every update of the round.
        """
        if len(standings) < 2 * self.liars + 3:
            return {}
        points = torch.stack([_flat(fields) for fields in standings.values()])
        distances = torch.linalg.vector_norm(points - self._centre(points), dim=1).tolist()
        middle = sorted(distances)[(len(distances) - 1) // 2]
        by_distance = sorted(zip(distances, standings, strict=True), reverse=True)
        return {
            name: f"it is {distance:.3g} from the {self.centre} of all, more than "
            f"{self.factor:g} times the median distance of {middle:.3g}"
            for distance, name in by_distance[: self.liars]
            if distance > self.factor * middle
        }

    def _centre(self, points: Tensor) -> Tensor:
        if self.centre == "median":
            ordered = points.sort(0).values
            count = len(points)
            return (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        if self.centre == "trimmed mean":
            return points.sort(0).values[self.liars : len(points) - self.liars].mean(0)
        if self.centre == "krum":
            return points[krum(points, self.liars)]
        return geometric_median(points)


def krum(points: Tensor, liars: int) -> int:
    """Return the row with the smallest sum of squared distances to its n - liars - 2 nearest."""
    squares = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").square()
    # Every row is its own nearest, at distance zero.
    scores = squares.sort(1).values[:, 1 : len(points) - liars - 1].sum(1)
    return int(scores.argmin())


def geometric_median(points: Tensor, iterations: int = 100, tolerance: float = 1e-9) -> Tensor:
    """Return the point with the smallest sum of distances, by Weiszfeld's smoothed iteration."""
    centre = points.mean(0)
    scale = float(torch.linalg.vector_norm(points - centre, dim=1).mean())
    if scale == 0:
        return centre
    for _ in range(iterations):
        distances = torch.linalg.vector_norm(points - centre, dim=1).clamp_min(1e-6 * scale)
        weights = 1 / distances
        new = (weights / weights.sum()) @ points
        moved = float(torch.linalg.vector_norm(new - centre))
        centre = new
        if moved <= tolerance * scale:
            break
    return centre


def _flat(fields: Fields) -> Tensor:
    return torch.cat([t.flatten().double() for field in fields.values() for t in field.values()])
