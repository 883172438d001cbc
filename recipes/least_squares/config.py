"""The problem's size, the four panels and their runs."""

from dataclasses import dataclass
from typing import Literal

from torchpisa import penalty

__all__ = ["GAMMAS", "PANELS", "PRESETS", "SIGMAS", "Config", "Panel", "Settings", "plan"]


@dataclass(frozen=True)
class Config:
    """Settings that all runs share."""

    batches: int  # m
    features: int  # w is in R^features
    rounds: int
    rho: float
    beta: float = 0.999  # of the second moment, as in the published scripts
    smallest: int = 50  # samples in a batch
    largest: int = 150
    seed: int = 0


# The paper gives m = 32 and w in R^100 and leaves the rest open; README.md tells how it was chosen.
PRESETS = {
    "quick": Config(batches=4, features=8, rounds=120, rho=0.15),
    "paper": Config(batches=32, features=100, rounds=300, rho=0.1),
}


@dataclass(frozen=True)
class Settings:
    """The settings of one run: the preconditioner, sigma^0, and gamma every k0 iterations."""

    preconditioner: Literal["hessian", "second_moment"]
    sigma: float
    gamma: float
    k0: int = 1

    @property
    def name(self) -> str:
        return f"{self.preconditioner}_sigma{self.sigma:g}_gamma{self.gamma:g}_every{self.k0}"


@dataclass(frozen=True)
class Panel:
    """A panel of the picture with its runs, by the value that is varied."""

    title: str
    letter: str
    runs: dict[float, Settings]


SIGMAS = [2.0**k for k in range(2, 8)]
GAMMAS = [0.5, 0.6, 0.7, 0.8, 0.9, 0.99]
PANELS = {
    "a": Panel(
        "σ⁰, second-order information", "σ⁰", {s: Settings("hessian", s, 0.99) for s in SIGMAS}
    ),
    "b": Panel("σ⁰, second moment", "σ⁰", {s: Settings("second_moment", s, 0.99) for s in SIGMAS}),
    "c": Panel("γ, k₀ = 1", "γ", {g: Settings("second_moment", 16.0, g) for g in GAMMAS}),
    "d": Panel(
        "γ, k₀ = ⌈ln γ / ln 0.99⌉",
        "γ",
        {g: Settings("second_moment", 16.0, g, penalty.k0(g)) for g in GAMMAS},
    ),
}


def plan(config: Config) -> dict[str, Settings]:
    """Return all runs by name; one that several panels share occurs once."""
    return {s.name: s for panel in PANELS.values() for s in panel.runs.values()}
