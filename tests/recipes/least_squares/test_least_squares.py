"""Least squares tells the paper's story, in the preset `quick` and in the committed results."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes import __main__ as command
from recipes.least_squares import RECIPE
from recipes.least_squares.check import arrival, rises, settling
from recipes.least_squares.config import PANELS, PRESETS, Settings
from recipes.least_squares.run import make, run
from recipes.recipe import Results
from recipes.tables import checks_table

ROOT = Path(__file__).parents[3]
SAVED = ROOT / "docs" / "results" / "least_squares.json"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def load(path: str) -> Results:
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    return results


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    command.main(["least_squares", "--out", str(folder)])
    return folder / "least_squares.json"


@pytest.fixture
def results(quick: Path) -> Results:
    return load(str(quick))


@pytest.mark.xdist_group("least_squares")
class TestLeastSquares:
    def test_quick_tells_the_papers_story(self, results: Results) -> None:
        checks = results["checks"]
        assert [check["panel"] for check in checks] == list("aaabbbcccdd")
        assert not [check for check in checks if not check["holds"]]

    def test_runs_that_panels_share_are_run_once(self, results: Results) -> None:
        assert len(results["runs"]) == 22
        (shared,) = set.intersection(
            *({s.name for s in PANELS[letter].runs.values()} for letter in "bcd")
        )
        assert results["runs"][shared]["settings"]["sigma"] == 16
        for log in results["runs"].values():
            assert log["iteration"] == list(range(PRESETS["quick"].rounds + 1))

    def test_picture_has_the_papers_values(self, quick: Path) -> None:
        text = quick.with_suffix(".svg").read_text(encoding="utf-8")
        for value in ["2²", "2³", "2⁴", "2⁵", "2⁶", "2⁷"]:
            assert text.count(f"σ⁰ = {value}<") == 2
        for value in (0.5, 0.6, 0.7, 0.8, 0.9, 0.99):
            assert text.count(f"γ = {value}<") == 2

    @pytest.mark.parametrize(
        ("number", "panel", "value", "spoil"),
        [
            (0, "a", 4.0, lambda gaps: sorted(gaps, reverse=True)),  # no fluctuation
            (0, "a", 4.0, lambda gaps: [*gaps[:-1], 1.0]),  # too late, and never arrives
            (1, "a", 16.0, lambda gaps: [0.1, 1e-4] * 60 + gaps[120:]),  # not stable
            (1, "a", 32.0, lambda gaps: [max(gap, 1e-5) for gap in gaps]),  # does not arrive
            (2, "a", 128.0, lambda gaps: [gap**4 for gap in gaps]),  # arrives
            (2, "a", 128.0, lambda gaps: [*gaps[:9], 1.0, *gaps[10:]]),  # not smooth
            (4, "b", 32.0, lambda gaps: [max(gap, 1e-5) for gap in gaps]),
            (6, "c", 0.9, lambda gaps: [gap**3 for gap in gaps]),  # arrives too
            (7, "c", 0.5, lambda gaps: gaps[:1] * 60 + gaps[60:]),  # settles later
            (8, "c", 0.7, lambda gaps: [2 * gap for gap in gaps]),  # worse than a smaller gamma
            (9, "d", 0.5, lambda gaps: [max(gap, 1e-5) for gap in gaps]),
            (10, "d", 0.6, lambda gaps: [gaps[0], *gaps[:-1]]),  # an iteration behind
        ],
    )
    def test_checks_notice(
        self,
        results: Results,
        number: int,
        panel: str,
        value: float,
        spoil: Callable[[list[float]], list[float]],
    ) -> None:
        log = results["runs"][PANELS[panel].runs[value].name]
        log["gap"] = spoil(log["gap"])
        assert not RECIPE.check(results)[number].holds


def test_measures() -> None:
    assert rises([1.0, 0.1, 10.0, 1e-13, 1e-12]) == pytest.approx([0, 2, 0, 0])
    assert arrival([1.0, 1e-7, 1e-5, 1e-6, 1e-9]) == 3
    assert arrival([1e-7, 1e-5]) is None
    assert settling([5.0, 1.0, 2.0, 1.005, 1.0]) == 3


def test_data_is_that_of_the_cited_paper() -> None:
    config = PRESETS["paper"]
    problem = make(config)
    sizes = problem.parts.sizes
    assert len(sizes) == 32
    assert min(sizes) >= 50
    assert max(sizes) <= 150
    assert problem.a.shape == (sum(sizes), 100)
    assert problem.b.shape == (sum(sizes),)
    third = sum(sizes) // 3
    normal, student, uniform = problem.a[:third], problem.a[third:-third], problem.a[-third:]
    assert normal.var().item() == pytest.approx(1, rel=0.02)
    assert student.var().item() == pytest.approx(5 / 3, rel=0.03)
    assert student.abs().max() > 8  # heavy tails; the largest of as many normals is below 6
    assert uniform.var().item() == pytest.approx(100 / 12, rel=0.02)
    assert uniform.abs().max() <= 5
    for part in problem.parts.indices:  # every part has of everything
        assert len((part // third).unique()) >= 3
    assert torch.equal(problem.a, make(config).a)
    assert not torch.equal(problem.a, make(dataclasses.replace(config, seed=1)).a[: sum(sizes)])


def test_gap_is_relative_to_the_minimum() -> None:
    problem = make(PRESETS["quick"])

    def objective(w: torch.Tensor) -> torch.Tensor:
        return 0.5 * (problem.a @ w - problem.b).square().mean()

    w = torch.full_like(problem.optimum, 0.3)
    least = objective(problem.optimum)
    assert problem.gap(w) == pytest.approx(float(objective(w) / least - 1), rel=1e-9)
    assert problem.gap(problem.optimum) == 0
    for direction in (1e-4, -1e-4):
        assert objective(problem.optimum + direction) > least


def test_large_rho_damps_the_hessian_only() -> None:
    """Why the presets have a small one: the paper's panel a fluctuates like its panel b."""
    config = dataclasses.replace(PRESETS["quick"], rounds=40, rho=1.0)
    for preconditioner, fluctuates in (("hessian", False), ("second_moment", True)):
        lines = list(run(config, Settings(preconditioner, 4.0, 0.99)))
        assert (sum(rises([line["gap"] for line in lines])) > 1) == fluctuates, preconditioner


class TestCommitted:
    @pytest.fixture
    def saved(self) -> dict[str, Any]:
        return load(str(SAVED))

    def test_results_are_those_of_the_preset_and_hold(self, saved: dict[str, Any]) -> None:
        assert saved["preset"] == "paper"
        assert saved["config"] == dataclasses.asdict(PRESETS["paper"])
        assert saved["runs"].keys() == RECIPE.plan(PRESETS["paper"]).keys()
        checks = [dataclasses.asdict(check) for check in RECIPE.check(saved)]
        assert checks == saved["checks"]
        assert all(check["holds"] for check in checks)

    def test_readme_shows_them(self, saved: dict[str, Any]) -> None:
        readme = (ROOT / "recipes" / "least_squares" / "README.md").read_text(encoding="utf-8")
        assert checks_table(RECIPE.check(saved)) in readme
