r"""Reference data on the server, which show whether an update can come from real data."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchpisa.checks import check_range
from torchpisa.federated.algorithms.base import Algorithm, Fields, ServerState
from torchpisa.federated.clients.local_round import local_round
from torchpisa.federated.clients.objective import Loss, Objective, cross_entropy
from torchpisa.federated.trust.ledger import Ledger

__all__ = ["Reference", "Witnesses", "flat", "unexplained"]


class Reference:
    r"""A few trusted samples of every kind of data, kept by the server.

    A client's dual is minus an average of its gradients. If its data are a mixture of kinds that
    the server has samples of, such as labels, its dual is a mixture of the duals that those kinds
    would have: \(\pi_i \approx \sum_k p_k \hat\pi_k\) with \(p_k \ge 0\). So every kind of the
    reference trains along as a witness, whose updates do not count. The part of a client's dual
    that no mixture explains, \(\min_{p \ge 0} \|\pi_i - \sum_k p_k \hat\pi_k\| / \|\pi_i\|\), then
    tells a lie from data that no other client has.

    The server does the local work of every kind in each round, and needs as much memory as that
    many clients.

    Args:
        model: the network, on the device of the server's weights; its parameters are not used.
        inputs: the inputs of the samples.
        targets: the targets of the samples.
        kinds: an integer for the kind of each sample; by default the targets, if those are
            integers.
        loss: the loss of the training.
        limit: the part of a client's dual that may stay unexplained, by norm.
        factor: the multiple of the median over clients that it must exceed as well.
        largest: the largest sum of \(p_k\); it is about one for an honest client, whatever its
            data.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Tensor,
        targets: Tensor,
        *,
        kinds: Tensor | None = None,
        loss: Loss = cross_entropy,
        limit: float = 0.4,
        factor: float = 1.5,
        largest: float = 5.0,
    ) -> None:
        kinds = targets if kinds is None else kinds
        for name, value in (("inputs", inputs), ("targets", targets), ("kinds", kinds)):
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor, got a {type(value).__name__}")
        if len(inputs) != len(targets):
            raise ValueError(
                f"inputs and targets must have one length, got {len(inputs)} and {len(targets)}"
            )
        if kinds.is_floating_point() or kinds.shape != (len(targets),) or not len(targets):
            raise ValueError(
                f"kinds must be one integer for each of {len(targets)} samples, got "
                f"{kinds.dtype} of shape {tuple(kinds.shape)}"
            )
        check_range("limit", limit, 0, 1)
        check_range("factor", factor, 1, high_open=True)
        check_range("largest", largest, 1)
        self.objective = Objective(model, loss)
        self.data = [
            (inputs[kinds == kind], targets[kinds == kind]) for kind in torch.unique(kinds)
        ]
        self.limit = limit
        self.factor = factor
        self.largest = largest

    def __repr__(self) -> str:
        sizes = [len(targets) for _, targets in self.data]
        return (
            f"Reference(sizes={sizes}, limit={self.limit!r}, factor={self.factor!r}, "
            f"largest={self.largest!r})"
        )

    def testify(self, algorithm: Algorithm) -> "Witnesses":
        """Return witnesses of a training."""
        return Witnesses(self, algorithm)


class Witnesses:
    """Clients of the server's own, one for each kind of the reference, which do not count.

    Args:
        reference: their data.
        algorithm: the algorithm of the training.
    """

    def __init__(self, reference: Reference, algorithm: Algorithm) -> None:
        self._reference = reference
        self._algorithm = algorithm
        self._memories: list[Fields] = []
        self._ledger = Ledger()

    def complaints(self, server: ServerState, standings: Mapping[str, Fields]) -> dict[str, str]:
        """Train along, and return why clients cannot be believed, by client, the worst first.

        Args:
            server: as the round was opened with.
            standings: `Algorithm.standing` of every update of the round.
        """
        witnessed = self._train(server)
        if not standings:
            return {}
        points = torch.stack([flat(fields) for fields in standings.values()])
        rest, mixtures = unexplained(points, witnessed)
        parts = dict(zip(standings, rest.tolist(), strict=True))
        sizes = dict(zip(standings, mixtures.sum(1).tolist(), strict=True))
        middle = sorted(parts.values())[(len(parts) - 1) // 2]
        limit = max(self._reference.limit, self._reference.factor * middle)
        complaints = {
            name: f"{part:.0%} of it cannot be explained by the reference data, more than the "
            f"limit of {limit:.0%}"
            for name, part in sorted(parts.items(), key=lambda entry: -entry[1])
            if part > limit
        }
        for name, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
            if size > self._reference.largest:
                complaints.setdefault(
                    name, f"it is {size:.3g} times as large as the reference data explain"
                )
        return complaints

    def _train(self, server: ServerState) -> Tensor:
        """Run a round of every witness, and return their standings as rows."""
        algorithm, objective = self._algorithm, self._reference.objective
        down = algorithm.broadcast(server)
        rows = []
        for kind, data in enumerate(self._reference.data):
            if len(self._memories) == kind:
                self._memories.append(algorithm.remember(server.weights))
            with torch.enable_grad():
                update, self._memories[kind], work = local_round(
                    algorithm,
                    objective,
                    data,
                    down,
                    self._memories[kind],
                    key=(0, f"reference {kind}"),
                    iteration=server.iteration,
                )
            known = self._ledger.sums.get(str(kind), {})
            steps = torch.tensor(float(work.gradients), dtype=torch.float64)
            rows.append(flat(algorithm.standing(server, update, known, steps)))
            self._ledger.add(str(kind), algorithm.contribution(update))
        return torch.stack(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs."""
        return {"memories": list(self._memories), "ledger": dict(self._ledger.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._memories, self._ledger = list(state["memories"]), Ledger(dict(state["ledger"]))


def unexplained(points: Tensor, rows: Tensor, iterations: int = 300) -> tuple[Tensor, Tensor]:
    r"""Return the part of each point, by norm, that no mixture of the rows explains, and the best.

    \(\min_{p \ge 0} \|x - p^T V\| / \|x\|\) and its \(p\), by accelerated projected gradients,
    all points at once. A point of zeros is explained.

    Args:
        points: one per row.
        rows: \(V\).
        iterations: the number of iterations of the method.
    """
    tiny = torch.finfo(points.dtype).tiny
    sizes = torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp_min(tiny)
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(tiny)
    points, rows = points / sizes, rows / lengths
    gram, products = rows @ rows.T, points @ rows.T
    step = 1 / torch.linalg.matrix_norm(gram, 2).clamp_min(tiny)
    mixture = ahead = torch.zeros_like(products)
    momentum = 1.0
    for _ in range(iterations):
        new = (ahead - step * (ahead @ gram - products)).clamp_min(0)
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = new + (momentum - 1) / following * (new - mixture)
        settled = float((new - mixture).abs().max()) < 1e-5
        mixture, momentum = new, following
        if settled:
            break
    rest: Tensor = torch.linalg.vector_norm(points - mixture @ rows, dim=1)
    return rest, mixture * sizes / lengths.T


def flat(fields: Fields) -> Tensor:
    """Return all entries as one vector, in float64."""
    return torch.cat([t.flatten().double() for field in fields.values() for t in field.values()])
