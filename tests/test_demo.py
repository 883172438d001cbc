"""The demo: it runs, compares everyone, draws, and refuses bad options before it trains."""

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "digits.py"


def run(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8")


def test_demo_compares_and_draws(tmp_path: Path) -> None:
    done = run(DEMO, "--steps", 40, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {
        cells[1]: cells[2:-1]
        for line in done.stdout.splitlines()
        if (cells := [cell.strip() for cell in line.replace("|", "│").split("│")])[1:]
    }
    assert list(rows)[-4:] == ["AdamW", "SISA", "SISA, 4 parts", "NSISA"], done.stdout
    state = {}
    for name in list(rows)[-4:]:
        numbers = (float(cell.removesuffix(" %")) for cell in rows[name])
        loss, accuracy, best, _, state[name] = numbers
        assert 0 < loss < 2.3, name  # of the untrained network: log(10) = 2.30
        assert 10 < accuracy <= best <= 100, name
    assert state["AdamW"] == 8  # two float32 moments; the step counters vanish in the rounding
    assert state["SISA, 4 parts"] >= 4 * state["SISA"] > 0
    picture = tmp_path / "digits.png"
    assert str(picture.resolve()) in done.stdout
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert 1000 < width < 3000
    assert 400 < height < 2000
    assert 10_000 < len(content) < 500_000


def test_demo_takes_steps_that_are_no_whole_rounds(tmp_path: Path) -> None:
    done = run(DEMO, "--steps", 3, "--seed", 5, "--out", "other.svg", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["other.svg"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--steps", "0"), ("--seed", "-1"), ("--out", "nowhere/digits.png")],
)
def test_demo_refuses_bad_options(option: str, value: str, tmp_path: Path) -> None:
    done = run(DEMO, f"{option}={value}", cwd=tmp_path)
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert option in message
    assert value in message
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_demo_names_the_extra_it_needs(tmp_path: Path) -> None:
    without = f"import runpy, sys; sys.modules['rich'] = None; runpy.run_path({str(DEMO)!r})"
    done = run("-c", without, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == "The demo needs rich: pip install 'torchpisa[demo]'\n"
