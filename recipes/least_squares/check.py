"""The paper's statements about the four panels, compared with the curves."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from recipes.least_squares.config import GAMMAS, PANELS, SIGMAS
from recipes.recipe import Check, Results

__all__ = ["REACHED", "check", "curves"]

REACHED = 1e-6  # of F*: closer than this counts as the optimal value
FLOOR = 1e-12  # rises below it are of no interest
SETTLED = 0.01  # a curve that stays this close to its last value, relatively, has settled
CLOSE = 0.02  # curves this close, relative to the gap at the start, follow the same trajectory


def curves(results: Results, panel: str) -> dict[float, list[float]]:
    """Return the gaps of a panel's runs, by the value that is varied."""
    return {
        value: results["runs"][settings.name]["gap"]
        for value, settings in PANELS[panel].runs.items()
    }


def rises(gaps: Sequence[float]) -> list[float]:
    """Return the decades by which the gap rises in each iteration; 0 where it falls."""
    logs = [math.log10(max(gap, FLOOR)) for gap in gaps]
    return [max(0.0, after - before) for before, after in pairwise(logs)]


def arrival(gaps: Sequence[float]) -> int | None:
    """Return the first iteration from which the optimum is reached for good, or None."""
    above = [iteration for iteration, gap in enumerate(gaps) if gap > REACHED]
    first = above[-1] + 1 if above else 0
    return first if first < len(gaps) else None


def settling(gaps: Sequence[float]) -> int:
    """Return the first iteration from which the gap stays where it ends."""
    end = gaps[-1]
    away = [i for i, gap in enumerate(gaps) if abs(gap - end) > SETTLED * end]
    return away[-1] + 1 if away else 0


def increasing(values: Sequence[float]) -> bool:
    return all(before < after for before, after in pairwise(values))


def check(results: Results) -> list[Check]:
    """Check all statements, panel by panel."""
    sigma_checks = [c for panel in ("a", "b") for c in check_sigma(panel, curves(results, panel))]
    gamma_checks = [*check_gamma(curves(results, "c")), *check_k0(curves(results, "d"))]
    return [*sigma_checks, *gamma_checks]


def check_sigma(panel: str, gaps: dict[float, list[float]]) -> Iterator[Check]:
    up = {sigma: rises(gaps[sigma]) for sigma in SIGMAS}
    arrived = {sigma: arrival(gaps[sigma]) for sigma in SIGMAS}
    ends = {sigma: gaps[sigma][-1] for sigma in SIGMAS}

    last = max((i for i, rise in enumerate(up[4], start=1) if rise > 0), default=0)
    yield Check(
        panel,
        "σ⁰ = 2²: fluctuates significantly during the first 100 iterations, but eventually "
        "converges to the optimal value",
        f"{format_rises(up[4])}, the last time in iteration {last}; {format_arrival(arrived[4])}",
        sum(up[4]) > 1 and last <= 100 and arrived[4] is not None,
    )
    yield Check(
        panel,
        "σ⁰ = 2⁴ or 2⁵: more stable, reaches the optimum efficiently",
        f"2⁴ {format_rises(up[16])}, {format_arrival(arrived[16])}; "
        f"2⁵ {format_rises(up[32])}, {format_arrival(arrived[32])}",
        max(sum(up[16]), sum(up[32])) < 0.1 * sum(up[4]) and None not in (arrived[16], arrived[32]),
    )
    yield Check(
        panel,
        "σ⁰ > 2⁶: very smooth, but fails to reach the optimal value",
        f"2⁷ {format_rises(up[128])} and ends {ends[128]:.1e} above; 2⁶ {ends[64]:.1e}, "
        f"2⁵ {ends[32]:.1e}",
        sum(up[128]) == 0
        and arrived[128] is None
        and increasing([ends[sigma] for sigma in (32, 64, 128)]),
    )


def check_gamma(gaps: dict[float, list[float]]) -> Iterator[Check]:
    ends = [gaps[gamma][-1] for gamma in GAMMAS]
    arrived = [arrival(gaps[gamma]) for gamma in GAMMAS]
    yield Check(
        "c",
        "achieves the optimal value only when γ = 0.99",
        f"0.99 ends {ends[-1]:.1e} above, 0.9 {ends[-2]:.1e}",
        arrived[-1] is not None and not any(arrived[:-1]),
    )
    settled = [settling(gaps[gamma]) for gamma in GAMMAS[:-1]]
    yield Check(
        "c",
        "smaller γ leads to faster convergence",
        f"settled after {join_values(settled)} iterations (γ = {join_values(GAMMAS[:-1])})",
        increasing(settled),
    )
    yield Check(
        "c",
        "at the cost of solution quality",
        f"ends above the optimal value by {join_values(f'{end:.1e}' for end in ends)}",
        increasing(ends[::-1]),
    )


def check_k0(gaps: dict[float, list[float]]) -> Iterator[Check]:
    arrived = [arrival(gaps[gamma]) for gamma in GAMMAS]
    yield Check(
        "d",
        "all curves converge to the optimal value",
        f"reached after {join_values(arrived)} iterations",
        None not in arrived,
    )
    apart = max(max(column) - min(column) for column in zip(*gaps.values(), strict=True))
    share = apart / gaps[GAMMAS[0]][0]
    yield Check(
        "d",
        "all curves closely follow the same trajectory",
        f"never further apart than {100 * share:.1f} % of the gap at the start",
        share < CLOSE,
    )


def format_rises(up: Sequence[float]) -> str:
    return f"rises by {sum(up):.1f} decades in all" if sum(up) > 0 else "never rises"


def format_arrival(iterations: int | None) -> str:
    return "not reached" if iterations is None else f"reached after {iterations} iterations"


def join_values(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
