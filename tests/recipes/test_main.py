"""The command: it resumes, records and checks."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes import logs
from recipes.recipe import Check, Line, Recipe, Results


@dataclass(frozen=True)
class Size:
    steps: int
    seed: int = 0


@dataclass(frozen=True)
class Slope:
    by: float


class Toy:
    """A recipe of two runs that counts how often it does each, and can be told to break off."""

    def __init__(self) -> None:
        self.done: list[float] = []
        self.breaks = False
        self.holds = True
        self.recipe = Recipe(
            title="toy",
            presets={"small": Size(3), "large": Size(5)},
            plan=lambda config: {"flat": Slope(0.0), "steep": Slope(2 / 3)},
            run=self.run,
            check=lambda results: [Check("a", "said", "seen", self.holds)],
            draw=lambda results, path: path.write_bytes(b"") or None,
            run_key=dataclasses.asdict,
            partial=False,
        )

    def run(self, config: Size, settings: Slope) -> Iterator[Line]:
        self.done.append(settings.by)
        for step in range(config.steps):
            yield {"step": step, "height": settings.by * step + config.seed}
            if self.breaks and settings.by:
                raise KeyboardInterrupt


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Toy:
    toy = Toy()
    monkeypatch.setattr(command, "RECIPES", {"toy": toy.recipe})
    monkeypatch.chdir(tmp_path)
    return toy


def load(path: str) -> Results:
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    return results


def test_command_records_what_the_runs_depend_on(toy: Toy) -> None:
    command.main(["toy"])
    results = load("runs/small/toy.json")
    assert results["recipe"] == "toy"
    assert results["preset"] == "small"
    assert results["config"] == {"steps": 3, "seed": 0}
    assert results["checks"] == [{"panel": "a", "paper": "said", "here": "seen", "holds": True}]
    steep = results["runs"]["steep"]
    assert steep["settings"] == {"by": 2 / 3}
    assert steep["step"] == [0, 1, 2]
    assert steep["height"] == [0, 0.6667, 1.333]
    assert {"torch", "torchpisa", "python"} <= set(steep["versions"])
    assert steep["hardware"]["cpu"]
    assert steep["seconds"] >= 0
    log = Path("runs/small/toy/steep.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in log[1:4]][2] == {"step": 2, "height": 4 / 3}
    assert Path("runs/small/toy.svg").exists()


def test_finished_runs_are_not_run_again(toy: Toy) -> None:
    command.main(["toy"])
    first = load("runs/small/toy.json")
    Path("runs/small/toy.svg").unlink()
    command.main(["toy"])
    assert toy.done == [0, 2 / 3]
    assert load("runs/small/toy.json") == first
    assert Path("runs/small/toy.svg").exists()


def test_interrupted_run_is_run_again(toy: Toy) -> None:
    toy.breaks = True
    with pytest.raises(KeyboardInterrupt):
        command.main(["toy"])
    toy.breaks = False
    command.main(["toy"])
    assert toy.done == [0, 2 / 3, 2 / 3]
    assert len(load("runs/small/toy.json")["runs"]["steep"]["height"]) == 3


@pytest.mark.parametrize("kept", [0, 10, -5])
def test_log_cut_off_anywhere_is_no_finished_run(toy: Toy, kept: int) -> None:
    command.main(["toy"])
    path = Path("runs/small/toy/flat.jsonl")
    path.write_text(path.read_text(encoding="utf-8")[:kept], encoding="utf-8")
    assert logs.read(path) is None
    command.main(["toy"])
    assert toy.done == [0, 2 / 3, 0]


def test_other_configuration_in_the_same_folder_runs_again(toy: Toy) -> None:
    command.main(["toy", "--out", "here"])
    command.main(["toy", "--out", "here", "--seed", "7"])
    assert toy.done == [0, 2 / 3, 0, 2 / 3]
    assert load("here/toy.json")["config"]["seed"] == 7
    command.main(["toy", "--out", "here", "--preset", "large"])
    assert load("here/toy.json")["runs"]["flat"]["height"] == [0] * 5


def test_statement_that_fails_is_an_error_after_everything_is_saved(toy: Toy) -> None:
    toy.holds = False
    with pytest.raises(SystemExit, match="1 of 1 statements do not hold"):
        command.main(["toy"])
    assert not load("runs/small/toy.json")["checks"][0]["holds"]
    assert Path("runs/small/toy.svg").exists()


def test_show_draws_saved_results(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    Path("saved.json").write_text(json.dumps({"config": {}, "runs": {}}), encoding="utf-8")
    command.main(["toy", "--show", "saved.json"])
    assert "a  holds  said" in capsys.readouterr().out
    assert Path("saved.svg").exists()
    assert not toy.done


def test_known_runs_are_not_run_again(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["toy"])
    known = load("runs/small/toy.json")
    file = Path("known.json")
    known["runs"]["steep"]["settings"]["by"] = 0.5  # of another plan
    file.write_text(json.dumps(known), encoding="utf-8")
    command.main(["toy", "--known", str(file), "--out", "there", "--list"])
    assert capsys.readouterr().out.endswith("done  flat\nto do  steep\n")
    command.main(["toy", "--known", str(file), "--out", "there"])
    assert toy.done == [0.0, 2 / 3, 2 / 3]
    assert load("there/toy.json")["runs"]["flat"] == known["runs"]["flat"]
    command.main(["toy", "--known", str(file), "--out", "elsewhere", "--preset", "large"])
    assert toy.done[3:] == [0.0, 2 / 3]  # they depend on the preset
    with pytest.raises(SystemExit):
        command.main(["toy", "--known", "nowhere.json"])
    assert "must be a file that the recipe toy wrote, got nowhere.json" in capsys.readouterr().err


def test_results_of_several_machines_are_joined(
    toy: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("flat", "steep"):
        command.main(["toy", "--only", name, "--out", name, "--runs-only"])
    capsys.readouterr()
    ran = list(toy.done)
    files = [words for name in ("flat", "steep") for words in ("--known", f"{name}/toy.json")]
    command.main(["toy", "--no-runs", *files])
    assert toy.done == ran
    joined = load("runs/small/toy.json")
    assert joined["runs"] == {
        name: load(f"{name}/toy.json")["runs"][name] for name in ("flat", "steep")
    }
    assert not joined["missing"]
    changed = load("flat/toy.json")
    changed["runs"]["flat"]["settings"]["by"] = 0.5
    Path("changed.json").write_text(json.dumps(changed), encoding="utf-8")
    command.main(["toy", "--no-runs", "--known", "changed.json", "--out", "none"])
    assert "flat: the saved run has other settings" in capsys.readouterr().out
    assert load("none/toy.json")["missing"] == ["flat", "steep"]


@pytest.mark.parametrize("option", ["--known", "--show"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("runs: none", "got saved.json: Expecting value"),
        ("[1]", "which has no runs"),
        ('{"config": {}}', "which has no runs"),
        ('{"runs": {}}', "which has no config"),
        ('{"recipe": "other", "runs": {}}', "which is of other"),
    ],
)
def test_files_that_are_no_results_are_refused(
    toy: Toy, capsys: pytest.CaptureFixture[str], option: str, text: str, message: str
) -> None:
    Path("saved.json").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit):
        command.main(["toy", option, "saved.json"])
    assert message in capsys.readouterr().err
    assert not toy.done


def test_progress_is_for_terminals(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(["toy"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:2]] == ["1/2 flat", "2/2 steep"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    command.main(["toy", "--seed", "1"])
    assert "2/2 steep: step 2  height 2.333\r" in capsys.readouterr().out


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"]):
        with pytest.raises(SystemExit) as end:
            command.main(words)
        assert not end.value.code
        assert "least_squares" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="got 'nothing'"):
        command.main(["nothing"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "huge"], "huge"),
        (["--seed", "-1"], "--seed must be >= 0, got -1"),
        (["--show", "nowhere.json"], "--show must be a file that the recipe toy wrote"),
        (["--out", "notes"], "argument --out: must be a folder, got the file 'notes'"),
        (["--checkpoints", "notes"], "argument --checkpoints: must be a folder, got the file"),
        (["--device", "abacus"], "argument --device: must be a device of torch, got 'abacus'"),
        (["--device", "cuda:99"], "argument --device: must be a device of this machine, which"),
    ],
)
def test_bad_options_are_refused(
    toy: Toy,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("notes").touch()
    recipe = dataclasses.replace(toy.recipe, options=("device", "checkpoints"))
    monkeypatch.setattr(command, "RECIPES", {"toy": recipe})
    with pytest.raises(SystemExit):
        command.main(["toy", *options])
    assert message in capsys.readouterr().err
    assert not toy.done


def test_folder_that_cannot_be_made_ends_the_command(toy: Toy) -> None:
    Path("notes").touch()
    with pytest.raises(SystemExit, match=r"Not a directory: 'notes/"):
        command.main(["toy", "--out", "notes/here"])
    assert not toy.done


def test_results_that_cannot_be_written_end_the_command(toy: Toy) -> None:
    Path("runs/small/toy.json").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"Is a directory: 'runs.small.toy\.json'"):
        command.main(["toy"])
    Path("saved.json").write_text(json.dumps({"config": {}, "runs": {}}), encoding="utf-8")
    Path("saved.svg").mkdir()
    with pytest.raises(SystemExit, match=r"saved\.svg"):
        command.main(["toy", "--show", "saved.json"])


def test_log_that_another_command_wrote_over_is_not_put_on_the_time_limit(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = logs.record

    def write_over(path: Path, *arguments: Any) -> None:
        record(path, *arguments)
        path.write_text("{", encoding="utf-8")

    monkeypatch.setattr(logs, "record", write_over)
    command.main(["toy"])
    assert "1/2 flat: its log is damaged; does another command" in capsys.readouterr().out


def test_missing_matplotlib_is_said_before_the_runs(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"torchpisa\[demo\]"):
        command.main(["toy"])
    assert not toy.done
