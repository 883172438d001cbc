"""The demo and the other example on digits: they run, compare, draw, and refuse bad options."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS, FEDERATED = EXAMPLES / "digits.py", EXAMPLES / "federated.py"
both = pytest.mark.parametrize("demo", [DIGITS, FEDERATED], ids=lambda path: path.stem)


def run(*arguments: object, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8")


def table(text: str) -> dict[str, list[str]]:
    """Return the rows of a printed table by their first cell."""
    return {
        cells[1]: cells[2:-1]
        for line in text.splitlines()
        if (cells := [cell.strip() for cell in line.replace("|", "│").split("│")])[1:]
    }


def check_picture(path: Path) -> None:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert 1000 < width < 3000
    assert 400 < height < 2000
    assert 10_000 < len(content) < 500_000


def test_digits_compares_and_draws(tmp_path: Path) -> None:
    done = run(DIGITS, "--steps", 42, cwd=tmp_path)  # no whole number of rounds of four
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
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
    check_picture(picture)


def test_federated_compares_and_draws(tmp_path: Path) -> None:
    done = run(FEDERATED, "--rounds", 4, "--seed", 5, "--out", "other.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    names = ["FedAvg", "FedProx", "FedNova", "Scaffold", "SISA", "MISA"]
    assert list(rows)[-6:] == names, done.stdout
    for name in names:
        for cell in rows[name][:3]:
            last, best = (float(part) for part in cell.removesuffix(")").split(" ("))
            assert 0 < last <= best <= 100, name
    steps = {name: int(rows[name][3].replace(",", "")) for name in names}
    assert steps["SISA"] == steps["MISA"] == 4 * 10  # one per client and round
    assert {steps[name] for name in names[:4]} == {steps["FedAvg"]}
    assert steps["FedAvg"] > 10 * steps["SISA"]
    sent = {name: float(rows[name][4]) for name in names}
    assert sent["Scaffold"] == pytest.approx(2 * sent["FedAvg"], abs=1)  # printed as whole numbers
    assert sent["SISA"] == sent["MISA"] == sent["FedAvg"]
    assert str((tmp_path / "other.png").resolve()) in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["other.png"]
    check_picture(tmp_path / "other.png")


@pytest.mark.parametrize(
    ("demo", "option", "value"),
    [
        *((DIGITS, "--steps", "0"), (FEDERATED, "--rounds", "0")),
        *((demo, "--seed", "-1") for demo in (DIGITS, FEDERATED)),
        *((demo, "--out", "nowhere/x.png") for demo in (DIGITS, FEDERATED)),
    ],
)
def test_bad_options_are_refused(
    demo: Path,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(demo), f"{option}={value}"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(demo), run_name="__main__")
    assert end.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert option in message
    assert value in message
    assert not list(tmp_path.iterdir())


@both
def test_the_extra_is_named(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(demo))
    assert end.value.code == "The demo needs rich: pip install 'torchpisa[demo]'"
