r"""Robust selection: reject updates that no honest client would send.

A client whose update is rejected is absent from the round, and every algorithm has a rule for
that: its dual or control variate stays as it was, on both sides. So whole updates are rejected, and
the server's \(\Pi = \sum_i \alpha_i \pi_i\) stays the sum over its clients. A robust mean in place
of the sum, as for FedAvg, would break that, and with heterogeneous data move the solution.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchpisa.checks import check_choice, check_count, check_range
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState
from torchpisa.federated.trust.reference import Reference, flat

__all__ = ["Judge", "RobustSelection"]

Centre = Literal["median", "trimmed mean", "krum", "geometric median"]

FORGETTING = 0.9
"""Factor per round on the evidence of earlier rounds about a client's response."""

MEASURED = 2
"""Responses of a client that are needed to judge it."""

PROBATION = 10
"""Rounds in a row without suspicion after which an excluded client is accepted again."""

ROUNDING = 100.0
"""Movement per weight, in units of rounding, below which the model is at rest."""

WEAK = 0.03
"""Median response below which responses say nothing, as with very noisy gradients."""

SPREADS = 5.0
"""Median deviations from the median beyond which a response is suspicious."""

CHANCE = 5.0
"""Multiple of the correlation of random vectors beyond which a response is suspicious."""


@dataclass(frozen=True)
class RobustSelection:
    r"""A rule for the updates that a server rejects.

    An update that is not finite is always rejected. The others pass two tests, and those that fail
    worst are rejected, `liars` at most.

    *Response.* A client is asked at every new \(w\), and answers with minus its gradient, or an
    average of its gradients. Where the model moves by \(\Delta w\), the gradient of an honest
    client changes along \(\Delta w\) by the curvature of its loss, whatever its data. So the
    correlation of \(\Delta w\) with the change of the answer is nearly the same for all honest
    clients, of the opposite sign for one that flips signs, and zero for one that repeats itself.
    The correlation is averaged over rounds and compared with the median. The answer is the update
    itself or the dual that it leads to, whichever honest clients agree about more closely.

    *Distance.* What is compared is where an update leaves its client (`Algorithm.standing`): its
    dual or control variate, or for FedAvg and its kin the movement. Its distance from a centre
    that a minority cannot move far is compared with the median distance. This assumes that honest
    clients are more alike than a liar is. With a `reference`, the question is how much of it no
    mixture of the reference data explains; that assumes nothing about the other clients.

    Clients count equally in both, whatever numbers of samples they claim.

    Args:
        centre: `"median"` of every coordinate; `"trimmed mean"` of every coordinate, without the
            `liars` smallest and largest; `"krum"`, the client that is closest to its
            n - liars - 2 nearest (Blanchard et al., 2017); or `"geometric median"`, the point
            with the smallest sum of distances (Pillutla et al., 2022).
        liars: clients that are rejected in a round, at most. With fewer than 2 liars + 3
            updates nobody is.
        factor: distance beyond which a client is rejected, in units of the median distance.
        patience: a client that is rejected in so many rounds in a row loses what it had
            contributed before, since a dual that was taken once would stay in the sum for good.
            It begins anew; if the reason was its response, after ten rounds in a row without a
            complaint.
        response: smallest response of a client, in units of the median response; minus infinity
            switches the test off.
        count_limit: a client counts with at most so many times the median number of samples,
            since numbers of samples cannot be checked. Infinity believes all of them.
        reference: data of the server's own, by which clients are judged.
    """

    centre: Centre = "geometric median"
    liars: int = 1
    factor: float = 2.0
    patience: int = 3
    response: float = 0.1
    count_limit: float = 2.0
    reference: Reference | None = None

    def __post_init__(self) -> None:
        choices = ("median", "trimmed mean", "krum", "geometric median")
        check_choice("centre", self.centre, choices)
        check_count("liars", self.liars)
        check_range("factor", self.factor, 1, high_open=True)
        check_count("patience", self.patience)
        check_range("response", self.response, -math.inf, 1, high_open=True)
        check_range("count_limit", self.count_limit, 1)
        if self.reference is not None and not isinstance(self.reference, Reference):
            raise TypeError(f"reference must be a Reference, got {self.reference!r}")

    def largest_count(self, samples: Sequence[int]) -> float:
        """Return the number of samples that a client counts with at most.

        It is to be found once, before the first round: shares are constant in time.

        Args:
            samples: the number that each client reports.
        """
        return self.count_limit * _lower_median(samples)

    def far(self, standings: Mapping[str, Fields]) -> dict[str, str]:
        """Return why a client fails the test of distance, by client, the farthest first.

        Args:
            standings: `Algorithm.standing` of every update of the round.
        """
        points = torch.stack([flat(fields) for fields in standings.values()])
        distances = torch.linalg.vector_norm(points - self._centre(points), dim=1).tolist()
        middle = _lower_median(distances)
        by_distance = sorted(zip(distances, standings, strict=True), reverse=True)
        return {
            name: f"it is {distance:.3g} from the {self.centre} of all, more than "
            f"{self.factor:g} times the median distance of {middle:.3g}"
            for distance, name in by_distance
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


class LastAnswer(NamedTuple):
    """The last answer of a client, and the round that it was given in."""

    iteration: int
    update: Tensor
    standing: Tensor


@dataclass
class Response:
    """Correlations of a client's answers with the movements of the model, summed over rounds.

    Attributes:
        update: weighted sum of the correlations with the change of its update.
        standing: weighted sum of the correlations with the change of its `Algorithm.standing`.
        weight: sum of the weights, which are smaller for earlier rounds.
        rounds: the number of rounds.
    """

    update: float = 0.0
    standing: float = 0.0
    weight: float = 0.0
    rounds: int = 0


class Judge:
    """Applies a `RobustSelection` to the clients of one training.

    It keeps the last update of every client, and the weights of every round with such an update.

    Args:
        rule: the rule.
        algorithm: the algorithm of the training.
    """

    def __init__(self, rule: RobustSelection, algorithm: Algorithm) -> None:
        self._rule = rule
        self._algorithm = algorithm
        self._witnesses = None if rule.reference is None else rule.reference.testify(algorithm)
        self._answers: dict[str, LastAnswer] = {}
        self._weights: dict[int, Tensor] = {}  # by round, as long as a last answer is of that round
        self._responses: dict[str, Response] = {}
        self._in_a_row: dict[str, int] = {}  # rounds in which a client was rejected
        self._probation: dict[str, int] = {}  # rounds without a complaint, of excluded clients

    def rejected(
        self,
        server: ServerState,
        updates: Mapping[str, Message],
        standings: Mapping[str, Fields],
        late: Collection[str] = (),
    ) -> dict[str, str]:
        """Return the reasons for rejecting clients, by client.

        Args:
            server: the server as the round began.
            updates: the updates that have arrived, by client.
            standings: `Algorithm.standing` of each.
            late: clients whose update was computed in an earlier round.
        """
        rule = self._rule
        broken = {
            name: "it is not finite"
            for name, update in updates.items()
            if not (_is_finite(update.tensors) and _is_finite(standings[name]))
        }
        updates = {name: update for name, update in updates.items() if name not in broken}
        standings = {name: standings[name] for name in updates}
        self._record_answers(server, updates, standings, late)
        unexplained: dict[str, str] = {}
        if self._witnesses is not None:  # called in every round, because it keeps state
            unexplained = self._witnesses.complaints(server, standings)
        suspects: dict[str, str] = {}
        unresponsive: dict[str, str] = {}
        if len(updates) >= 2 * rule.liars + 3:
            unresponsive = self._unresponsive(updates)
            other = unexplained if self._witnesses is not None else rule.far(standings)
            suspects = {
                **unresponsive,
                **{name: why for name, why in other.items() if name not in unresponsive},
            }
        # Clients on probation get no benefit of the doubt.
        doubts = {**self._unresponsive(self._probation, strict=True), **suspects}
        excluded = {name: why for name in updates if (why := self._on_probation(name, doubts))}
        # The strongest evidence first; a new suspect takes the place of an excluded client.
        chosen = dict(list({**unresponsive, **excluded, **suspects}.items())[: rule.liars])
        chosen = {**broken, **chosen}
        for name in (*updates, *broken):
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if name in chosen else 0
            # Unusual data are no reason for exclusion: the next update may be like the others.
            if self._in_a_row[name] >= rule.patience and name in unresponsive:
                self._probation.setdefault(name, 0)
        return chosen

    def withdrawn(self) -> list[str]:
        """Return the clients that have been rejected too often in a row."""
        return [name for name, rounds in self._in_a_row.items() if rounds >= self._rule.patience]

    def _on_probation(self, name: str, doubts: Mapping[str, str]) -> str | None:
        """Return the reason for excluding a client still, or None."""
        if name not in self._probation:
            return None
        if name in doubts:
            self._probation[name] = 0
            return doubts[name]
        self._probation[name] += 1
        if self._probation[name] >= PROBATION:
            del self._probation[name]
            return None
        return f"it was put out, and has been unsuspicious for {self._probation[name]} rounds only"

    def _record_answers(
        self,
        server: ServerState,
        updates: Mapping[str, Message],
        standings: Mapping[str, Fields],
        late: Collection[str],
    ) -> None:
        """Compare the answers of clients with their last ones."""
        weights = flat({"weights": server.weights})
        dtype = next(iter(server.weights.values())).dtype
        for name, update in updates.items():
            last = self._answers.pop(name, None)
            if name in late:  # the model that it answers to is no longer known
                continue
            answer = self._algorithm.contribution(update) or update.tensors
            kind = next(iter(answer))
            now = LastAnswer(
                server.iteration, flat({kind: answer[kind]}), flat({kind: standings[name][kind]})
            )
            if last is not None:
                self._measure(name, weights - self._weights[last.iteration].double(), last, now)
            stored = (now.update.to(dtype), now.standing.to(dtype))
            self._answers[name] = LastAnswer(server.iteration, *stored)
        self._weights[server.iteration] = weights.to(dtype)
        needed = {answer.iteration for answer in self._answers.values()}
        self._weights = {i: w for i, w in self._weights.items() if i in needed}

    def _measure(self, name: str, moved: Tensor, last: LastAnswer, now: LastAnswer) -> None:
        known = self._responses.get(name)
        if known is None:  # the first update of a client is larger than those that follow
            self._responses[name] = Response()
            return
        # At rest, what is left of a difference is rounding.
        dtype = last.update.dtype
        if float(moved.norm()) <= ROUNDING * torch.finfo(dtype).eps * math.sqrt(len(moved)):
            return
        self._responses[name] = Response(
            FORGETTING * known.update + _correlation(moved, now.update - last.update.double()),
            FORGETTING * known.standing
            + _correlation(moved, now.standing - last.standing.double()),
            FORGETTING * known.weight + 1,
            known.rounds + 1,
        )

    def _unresponsive(self, names: Collection[str], strict: bool = False) -> dict[str, str]:
        """Return why clients fail the test of response, by client, the worst first.

        Args:
            names: the names of the clients to judge.
            strict: by update and by standing, and however much honest clients differ.
        """
        known = {
            name: response
            for name, response in self._responses.items()
            if name in self._answers and response.rounds >= MEASURED
        }
        if len(known) < 2 * self._rule.liars + 3:
            return {}
        kinds = [
            _agreement({name: r.update / r.weight for name, r in known.items()}),
            _agreement({name: r.standing / r.weight for name, r in known.items()}),
        ]
        if not strict:
            kinds = [max(kinds, key=lambda kind: abs(kind.middle) / max(kind.spread, 1e-12))]
        chance = CHANCE / math.sqrt(len(next(iter(self._weights.values()))))
        return {
            name: f"its response to the movement of the model is {found[name]:.2g}, that of most "
            f"is about {middle:.2g}"
            for found, middle, spread in kinds
            if abs(middle) >= WEAK
            for name in sorted(found, key=lambda name: found[name] / middle)
            if name in names
            and found[name] / middle < self._rule.response
            and (strict or abs(found[name] - middle) > max(SPREADS * spread, chance))
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs."""
        return {
            "answers": {name: answer._asdict() for name, answer in self._answers.items()},
            "weights": dict(self._weights),
            "responses": {name: vars(known) for name, known in self._responses.items()},
            "in_a_row": dict(self._in_a_row),
            "probation": dict(self._probation),
            "witnesses": None if self._witnesses is None else self._witnesses.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._answers = {name: LastAnswer(**answer) for name, answer in state["answers"].items()}
        self._weights = dict(state["weights"])
        self._responses = {name: Response(**known) for name, known in state["responses"].items()}
        self._in_a_row = dict(state["in_a_row"])
        self._probation = dict(state["probation"])
        if self._witnesses is not None and state["witnesses"] is not None:
            self._witnesses.load_state_dict(state["witnesses"])


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


def _is_finite(fields: Fields) -> bool:
    return all(bool(t.isfinite().all()) for field in fields.values() for t in field.values())


class Agreement(NamedTuple):
    """Numbers by client, their median, and the median distance from it."""

    found: dict[str, float]
    middle: float
    spread: float


def _agreement(found: dict[str, float]) -> Agreement:
    middle = _lower_median(list(found.values()))
    return Agreement(found, middle, _lower_median([abs(x - middle) for x in found.values()]))


def _correlation(a: Tensor, b: Tensor) -> float:
    scale = float(a.norm() * b.norm())
    return float(a @ b) / scale if scale > 0 and a.shape == b.shape else 0.0


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
