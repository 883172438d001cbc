"""CartPole, many at once, and proximal policy optimization on it.

The equations are those of Barto, Sutton and Anderson (1983), with the constants and limits that
everybody uses: pushes of 10 N, steps of 0.02 s, over at 12 degrees, 2.4 m or 500 steps.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.defaults.data import generator
from benchmarks.defaults.problem import Update

__all__ = ["MOST_STEPS", "Actor", "Player", "balanced", "move", "starts"]

MOST_STEPS = 500
POLES, MOVES, EPOCHS, PARTS = 16, 64, 4, 4
DISCOUNT, SMOOTHING, CLIP = 0.99, 0.95, 0.2


def starts(count: int, random: torch.Generator) -> Tensor:
    """Return states to begin with: position, speed, angle and its speed, all near zero."""
    return 0.1 * torch.rand(count, 4, generator=random) - 0.05


def move(state: Tensor, push: Tensor) -> Tensor:
    """Return the states after pushing every cart to the left (0) or to the right (1)."""
    _, speed, angle, turning = state.unbind(1)
    cart, pole, half_length, gravity, tick = 1.0, 0.1, 0.5, 9.8, 0.02
    sine, cosine = angle.sin(), angle.cos()
    force = 20.0 * push - 10.0
    pressed = (force + pole * half_length * turning**2 * sine) / (cart + pole)
    inertia = half_length * (4 / 3 - pole * cosine**2 / (cart + pole))
    twist = (gravity * sine - cosine * pressed) / inertia
    thrust = pressed - pole * half_length * twist * cosine / (cart + pole)
    changes = torch.stack((speed, thrust, turning, twist), 1)
    return state + tick * changes


def fallen(state: Tensor) -> Tensor:
    """Tell which poles have fallen or left the track."""
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > math.radians(12))


class Actor(nn.Module):
    """Two MLPs of width 64: preferences for the two moves, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                *(nn.Linear(4, 64), nn.Tanh()), *(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, out)
            )
            for out in (2, 1)
        )


@torch.no_grad()
def balanced(actor: Actor | None, state: Tensor) -> float:
    """Return the mean number of steps that poles stay up; without an actor, pushed at random."""
    random = generator()
    standing, total = torch.ones(len(state), dtype=torch.bool), 0
    for _ in range(MOST_STEPS):
        if actor is None:
            push = torch.randint(2, (len(state),), generator=random)
        else:
            push = actor.policy(state).argmax(1)
        state = move(state, push)
        standing &= ~fallen(state)
        total += int(standing.sum())
        if not standing.any():
            break
    return total / len(state)


class Player:
    """Poles in motion and the actor that learns from them."""

    def __init__(self, actor: Actor, seed: int) -> None:
        self.actor, self.random = actor, generator(seed)
        self.state, self.age = starts(POLES, self.random), torch.zeros(POLES)

    @torch.no_grad()
    def _play(self) -> tuple[Tensor, ...]:
        """Return states, moves and their log-probabilities, advantages and returns, in a row."""
        states, pushes, taken, rewards, ends = [], [], [], [], []
        for _ in range(MOVES):
            log_probabilities = F.log_softmax(self.actor.policy(self.state), 1)
            push = torch.multinomial(log_probabilities.exp(), 1, generator=self.random)
            states.append(self.state)
            pushes.append(push)
            taken.append(log_probabilities.gather(1, push))
            after = move(self.state, push.squeeze(1))
            self.age += 1
            over, late = fallen(after), self.age >= MOST_STEPS
            # An episode that reaches its time limit counts as one that continues.
            going_on = DISCOUNT * self.actor.value(after).squeeze(1)
            rewards.append(1 + torch.where(late & ~over, going_on, 0.0))
            ends.append((over | late).float())
            fresh = starts(POLES, self.random)
            self.state = torch.where((over | late)[:, None], fresh, after)
            self.age = torch.where(over | late, 0.0, self.age)
        values = self.actor.value(torch.stack((*states, self.state))).squeeze(2)
        advantage, advantages = torch.zeros(POLES), []
        for k in reversed(range(MOVES)):
            stays = 1 - ends[k]
            surprise = rewards[k] + DISCOUNT * stays * values[k + 1] - values[k]
            advantage = surprise + DISCOUNT * SMOOTHING * stays * advantage
            advantages.insert(0, advantage)
        gained = torch.stack(advantages)
        rows = *(torch.stack(t) for t in (states, pushes, taken)), gained, gained + values[:-1]
        return tuple(row.flatten(0, 1) for row in rows)

    def step(self, update: Update) -> None:
        """Play, and learn from it in `EPOCHS` rounds of `PARTS` batches."""
        played = self._play()
        for _ in range(EPOCHS):
            order = torch.randperm(POLES * MOVES, generator=self.random)
            for index in order.chunk(PARTS):
                update(self._loss(*(column[index] for column in played)))

    def _loss(
        self, state: Tensor, push: Tensor, before: Tensor, advantage: Tensor, gained: Tensor
    ) -> Tensor:
        log_probabilities = F.log_softmax(self.actor.policy(state), 1)
        ratio = (log_probabilities.gather(1, push) - before).exp().squeeze(1)
        scaled = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        policy = -torch.minimum(ratio * scaled, clipped * scaled).mean()
        value = F.mse_loss(self.actor.value(state).squeeze(1), gained)
        surprise = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
        return policy + 0.5 * value - 0.01 * surprise
