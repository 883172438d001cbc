r"""Differential privacy of a client, in a form that keeps the algorithms' sums right.

Noise that a server adds to \(\sum_i \alpha_i \delta_i\) would stay in \(\Pi\) for good: the
clients' duals know nothing of it, so nothing takes it out again, and what adds up from round to
round is a random walk. Here every client adds its part of the noise to its update and to its own
dual. \(\Pi\) stays the sum of the duals, and the next local step corrects noise as it corrects
any other error of a dual.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from torchpisa.checks import check_count, check_range
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message

__all__ = ["GaussianNoise", "PrivacyAccount"]

ORDERS = [1 + 2 ** (power / 4) for power in range(-32, 61)]
"""Rényi orders that the accountant tries: for epsilons from 0.001 to some 1,000."""


@dataclass(frozen=True)
class GaussianNoise:
    r"""Clipping and Gaussian noise for every update of a client, before it leaves the client.

    The client's memory moves by what is sent, noise included, so that the server's sum stays the
    sum of its clients' memories.

    *Against those who see the model* (central privacy), the noise of all clients of a round
    protects each. An update has norm `clip` at most, so that of client i changes
    \(\sum_j \alpha_j \delta_j\) by \(\alpha_i\) `clip`, while the sum carries noise of standard
    deviation `noise` times `clip` times \((\sum_j \alpha_j^2)^{1/2}\), over those present. The
    noise multiplier of the round is therefore \((\sum_j \alpha_j^2)^{1/2} / \alpha_i\) times
    `noise`: with n equal clients \(\sqrt{n}\) times. `PrivacyAccount` adds up the rounds.

    *Against the server* and whoever reads the updates, it is `noise` itself.

    Neighbouring trainings are those in which one client sends an update of zero, with noise, in
    every round. Numbers of samples and who takes part are not protected, and no advantage is taken
    of clients that are drawn at random, since clients can work out the draw. Clients that
    collude know their own part of the noise. It is drawn from the random numbers of the operating
    system; what the rounding of floating-point numbers may give away is not counted.

    Args:
        clip: the norm, over all tensors of an update, that it is scaled down to.
        noise: the standard deviation of the noise in every entry, in units of `clip`.
        delta: the probability with which the reported epsilon may be exceeded; choose less than
            one divided by the number of clients.
    """

    clip: float
    noise: float
    delta: float = 1e-5

    def __post_init__(self) -> None:
        check_range("clip", self.clip, 0, low_open=True, high_open=True)
        check_range("noise", self.noise, 0, high_open=True)
        check_range("delta", self.delta, 0, 1, low_open=True, high_open=True)

    @classmethod
    def for_epsilon(
        cls, epsilon: float, *, clip: float, rounds: int, clients: int, delta: float = 1e-5
    ) -> "GaussianNoise":
        """Return the noise that a training of so many rounds needs for an epsilon at its end.

        Needs the extra `privacy`, whose accountant finds it.

        Args:
            epsilon: against those who see the model, after the last round.
            clip: the norm that an update is scaled down to.
            rounds: rounds in which a client takes part.
            clients: the number of clients of every round, with equal shares.
            delta: see `GaussianNoise`.
        """
        check_range("epsilon", epsilon, 0, low_open=True, high_open=True)
        check_count("rounds", rounds)
        check_count("clients", clients)
        cls(clip, 0.0, delta)  # checks both
        multiplier = _opacus("accountants.utils").get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=1.0,
            steps=rounds,
            accountant="rdp",
            epsilon_tolerance=1e-3 * epsilon,
            alphas=ORDERS,
        )
        return cls(clip, multiplier / math.sqrt(clients), delta)

    def apply(self, update: Message, generator: torch.Generator | None = None) -> Message:
        """Return the update, clipped and with noise.

        Args:
            update: the update without protection.
            generator: generator of the noise, on the CPU; by default the noise is secret.
        """
        tensors = [tensor for field in update.tensors.values() for tensor in field.values()]
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
        factor = min(1.0, self.clip / norm) if norm else 1.0

        def with_noise(tensor: torch.Tensor) -> torch.Tensor:
            noise = torch.empty(tensor.shape, dtype=torch.float64, device="cpu")
            noise = (
                _secret_normal(noise) if generator is None else noise.normal_(generator=generator)
            )
            noise = noise.to(tensor.device, tensor.dtype)
            return factor * tensor + self.noise * self.clip * noise

        return Message(
            {
                kind: {name: with_noise(tensor) for name, tensor in field.items()}
                for kind, field in update.tensors.items()
            },
            update.numbers,
        )

    def check(self, algorithm: Algorithm) -> None:
        """Raise ValueError if updates of an algorithm cannot be clipped."""
        if not algorithm.clippable:
            raise ValueError(
                "algorithm must be one whose updates can be clipped, got "
                f"{type(algorithm).__name__}: the first update of a client holds its weights, or "
                "decides sigma. Use FedDyn, FedPD, PISA or SISA with a sigma together with "
                "privacy=GaussianNoise(clip, noise)"
            )

    def protect(
        self,
        algorithm: Algorithm,
        update: Message,
        old: Fields,
        new: Fields,
        generator: torch.Generator | None = None,
    ) -> tuple[Message, Fields]:
        """Return the update, clipped and with noise, and the client's memory that matches it.

        Args:
            algorithm: the algorithm of the training.
            update: the update without protection.
            old: the client's memory before the round.
            new: the client's memory after the round.
            generator: generator of the noise; by default the noise is secret.
        """
        self.check(algorithm)
        sent = self.apply(update, generator)
        moved = {
            kind: {name: old[kind][name] + tensor for name, tensor in field.items()}
            for kind, field in algorithm.contribution(sent).items()
        }
        return sent, {**new, **moved}


class PrivacyAccount:
    r"""The privacy loss of each client in a training, against those who see its model.

    A sum with noise multiplier \(z\) is a Gaussian mechanism. Many of them with multipliers
    \(z_t\) are one with \(z^{-2} = \sum_t z_t^{-2}\). The account keeps that sum for each client;
    opacus' accountant of Rényi differential privacy turns the largest into an epsilon.

    Args:
        privacy: the clipping and noise of the clients.
        spent: sums to continue from, by client.

    Attributes:
        spent: \(\sum_t z_t^{-2}\), by client.
    """

    def __init__(self, privacy: GaussianNoise, spent: Mapping[str, float] | None = None) -> None:
        self._privacy = privacy
        self.spent: dict[str, float] = dict(spent or {})

    def add(self, shares: Mapping[str, float]) -> None:
        r"""Count a round.

        Args:
            shares: \(\alpha_i\) of the clients whose updates were summed up.
        """
        variance = self._privacy.noise**2 * sum(share**2 for share in shares.values())
        for name, share in shares.items():
            cost = share**2 / variance if variance else math.inf
            self.spent[name] = self.spent.get(name, 0.0) + cost

    @property
    def epsilon(self) -> float:
        """Return the epsilon of the client with the largest privacy loss."""
        largest = max(self.spent.values(), default=0.0)
        if largest == 0 or math.isinf(largest):
            return largest
        accountant = _opacus("accountants").RDPAccountant()
        accountant.history = [(1 / math.sqrt(largest), 1.0, 1)]
        return float(accountant.get_epsilon(self._privacy.delta, alphas=ORDERS))


def _secret_normal(out: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of float64 on the CPU with normal numbers that nobody can compute again.

    Not with a generator of PyTorch: on the CPU it reads only 32 bits of its seed. Whoever sees
    noise alone, as where a gradient is zero, could try all of them and subtract the rest.
    """
    for part in torch.split(out.view(-1), 2**20):
        pairs = max(1, -(-len(part) // 2))
        bits = torch.frombuffer(bytearray(os.urandom(16 * pairs)), dtype=torch.int64)
        # The upper 53 bits of each number, as uniform numbers in (0, 1]; then by Box and Muller.
        uniform = (((bits >> 11) & (2**53 - 1)) + 1).double() / 2**53
        radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
        part.copy_(torch.cat([radius * angle.cos(), radius * angle.sin()])[: len(part)])
    return out


def _opacus(module: str) -> Any:
    """Return a module of opacus, which is an extra, and slow to import."""
    try:
        return import_module(f"opacus.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "opacus":
            raise
        raise ModuleNotFoundError(
            "an epsilon needs opacus: pip install 'torchpisa[privacy]'", name=error.name
        ) from error
