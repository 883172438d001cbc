"""Runs in several processes, chosen ones, and what a recipe adds to the command."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from recipes import __main__ as command
from recipes import logs
from recipes.datasets import CorruptFileError
from recipes.execution import Runs, format_duration, logged_lines, progress_text, share_threads
from recipes.recipe import Check, Line, Recipe, Results
from tests.distributed.processes import TIMEOUT


@dataclass(frozen=True)
class Size:
    steps: int
    seed: int = 0


@dataclass(frozen=True)
class Slope:
    by: float


# Of the module and not of a test: other processes look them up by name.
def climb(config: Size, settings: Slope, *, device: str, data: str) -> Iterator[Line]:
    if settings.by < 0:
        raise ValueError("downhill")
    for step in range(config.steps):
        yield {"step": step, "height": settings.by * step, "process": os.getpid()}


def last_height(log: Results) -> Results:
    return {"settings": log["settings"], "top": log["height"][-1]}


PLAN = {"flat": Slope(0.0), "steep": Slope(2.0), "steeper": Slope(3.0)}
TOY = Recipe(
    title="toy",
    presets={"small": Size(3)},
    plan=lambda config: PLAN,
    run=climb,
    check=lambda results: [Check("a", "said", "seen", True)],
    draw=lambda results, path: path.touch() or None,
    options=("device", "data"),
    run_key=lambda config: {"steps": config.steps},
    report=lambda results: f"{len(results['runs'])} runs\n",
    partial=True,
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "RECIPES", {"toy": TOY})
    monkeypatch.chdir(tmp_path)


def load(path: str = "runs/small/toy.json") -> Results:
    results: Results = json.loads(Path(path).read_text(encoding="utf-8"))
    return results


@pytest.mark.usefixtures("toy")
def test_jobs_do_runs_in_other_processes_and_one_may_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(PLAN, "bad", Slope(-1.0))
        with pytest.raises(RuntimeError, match="1 runs failed: bad") as caught:
            command.main(["toy", "--jobs", "2", "--device", "cpu"])
        assert "downhill" in repr(caught.value.__cause__)
        assert "ValueError('downhill')" in capsys.readouterr().out
        command.main(["toy", "--list"])
        lines = capsys.readouterr().out.splitlines()
        assert lines == ["done  flat", "done  steep", "done  steeper", "to do  bad"]
    command.main(["toy", "--device", "cpu"])  # only reads the logs
    results = load()
    assert list(results["runs"]) == list(PLAN)  # in the order of the plan, whoever was first
    assert results["runs"]["steeper"]["height"] == [0, 3, 6]
    used = {number for run in results["runs"].values() for number in run["process"]}
    assert os.getpid() not in used
    assert len(used) <= 2


@pytest.mark.usefixtures("toy")
def test_a_queue_outlives_a_run_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"bad": Slope(-1.0), **PLAN}
    monkeypatch.setitem(command.RECIPES, "toy", dataclasses.replace(TOY, plan=lambda config: plan))
    with pytest.raises(RuntimeError, match="1 runs failed: bad") as caught:
        command.main(["toy", "--device", "cpu"])
    assert isinstance(caught.value.__cause__, ValueError)
    assert "1/4 bad: ValueError('downhill')" in capsys.readouterr().out
    command.main(["toy", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["to do  bad", "done  flat", "done  steep", "done  steeper"]


def slip(config: Size, settings: Slope, **options: str) -> Iterator[Line]:
    yield {"step": 0, "height": 0.0, "diverged": settings.by > 2}


@pytest.mark.usefixtures("toy")
def test_a_run_that_diverged_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(command.RECIPES, "toy", dataclasses.replace(TOY, run=slip))
    command.main(["toy", "--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(" s, diverged") for line in lines[:3]] == [False, False, True]


def lose_file(config: Size, settings: Slope, **options: str) -> Iterator[Line]:
    raise CorruptFileError("half a hill")
    yield {}


@pytest.mark.usefixtures("toy")
def test_data_that_is_damaged_ends_several_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = dataclasses.replace(TOY, run=lose_file)
    monkeypatch.setitem(command.RECIPES, "toy", lost)
    with pytest.raises(SystemExit, match="half a hill"):
        command.main(["toy", "--device", "cpu", "--jobs", "2"])


def rest(config: Size, settings: Slope, **options: str) -> Iterator[Line]:
    """Log where the run is done, and then nothing more."""
    yield {"process": os.getpid()}
    time.sleep(10 * TIMEOUT)


def give_resting_command(*words: str) -> None:
    command.RECIPES["toy"] = dataclasses.replace(TOY, run=rest)
    command.main(["toy", "--device", "cpu", *words])


@contextlib.contextmanager
def resting_command(
    words: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Give a command; yield its process and that of the last run, once all of the runs rest."""
    code = f"from {__name__} import give_resting_command as give; give(*{list(words)})"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stderr=subprocess.DEVNULL,
    )
    try:
        paths = [Path(f"runs/small/toy/{name}.jsonl") for name in names]
        wait_until(lambda: all(path.is_file() and logged_lines(path) for path in paths))
        line = paths[-1].read_text(encoding="utf-8").splitlines()[1]
        yield process, json.loads(line)["process"]
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def has_ended(process: int) -> bool:
    """Return whether a process that may be nobody's child has ended."""
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_ends_its_processes(number: signal.Signals) -> None:
    with resting_command(["--jobs", "2"], ["flat", "steep"]) as (process, worker):
        assert worker != process.pid
        assert not has_ended(worker)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == -number
        wait_until(lambda: has_ended(worker))


@pytest.mark.skipif(logs.fcntl is None, reason="no locks")
@pytest.mark.usefixtures("toy")
def test_a_run_that_another_command_does_is_refused_before_any_begins() -> None:
    path = Path("runs/small/toy/steep.jsonl")
    with resting_command(["--only", "steep*"], ["steep"]):
        before = path.read_text(encoding="utf-8")
        for words in ([], ["--jobs", "2"], ["--only", "steeper"]):  # steeper waits for its turn
            with pytest.raises(SystemExit, match=r"steep.*is being written by another command"):
                command.main(["toy", "--device", "cpu", *words])
        assert not Path("runs/small/toy/flat.jsonl").exists()
        command.main(["toy", "--device", "cpu", "--only", "flat"])
        assert list(load()["runs"]) == ["flat"]
        assert path.read_text(encoding="utf-8") == before
    command.main(["toy", "--device", "cpu"])  # the other one was killed
    assert list(load()["runs"]) == list(PLAN)


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    "error", [FileNotFoundError("no such hill"), OSError(28, "No space left on device")]
)
def test_what_is_wrong_with_files_ends_the_command(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def run(config: Size, settings: Slope, **options: str) -> Iterator[Line]:
        begun.append(settings)
        raise error
        yield {}

    monkeypatch.setitem(command.RECIPES, "toy", dataclasses.replace(TOY, run=run))
    with pytest.raises(SystemExit, match=str(error.args[-1])):
        command.main(["toy", "--device", "cpu"])
    assert len(begun) == 1


@pytest.mark.usefixtures("toy")
def test_only_some_runs(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["toy", "--only", "steep*", "--device", "cpu"])
    results = load()
    assert list(results["runs"]) == ["steep", "steeper"]
    assert results["missing"] == ["flat"]
    assert "1 of 3 runs are still to be done" in capsys.readouterr().out
    assert Path("runs/small/toy.md").read_text(encoding="utf-8") == "2 runs\n"
    command.main(["toy", "--only", "flat", "--device", "cpu"])
    assert list(load()["runs"]) == list(PLAN)  # with what the logs have of the others
    with pytest.raises(SystemExit):
        command.main(["toy", "--only", "nothing"])
    assert "--only must match a run (--list names them), got 'nothing'" in capsys.readouterr().err


def test_recipe_that_needs_all_runs_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = dataclasses.replace(TOY, partial=False)
    monkeypatch.setattr(command, "RECIPES", {"toy": whole})
    monkeypatch.chdir(tmp_path)
    command.main(["toy", "--only", "flat", "--device", "cpu"])
    assert load()["checks"] == []
    assert not Path("runs/small/toy.svg").exists()
    command.main(["toy", "--device", "cpu"])
    assert Path("runs/small/toy.svg").exists()


@pytest.mark.usefixtures("toy")
def test_runs_depend_on_what_the_recipe_says(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["toy", "--device", "cpu"])
    command.main(["toy", "--seed", "7", "--device", "cpu"])
    assert capsys.readouterr().out.count("in the log") == 3
    assert load()["config"]["seed"] == 7


def test_saved_runs_are_condensed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = dataclasses.replace(TOY, condense=last_height)
    options = {"device": "cpu", "data": ""}
    results = command.run_recipe(recipe, Size(3), tmp_path, options=options)
    assert results["runs"]["steep"] == {"settings": {"by": 2.0}, "top": 4.0}


@pytest.mark.usefixtures("toy")
def test_data_folder_reaches_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(config: Size, settings: Slope, *, device: str, data: str) -> Iterator[Line]:
        seen.append(data)
        yield {"step": 0}

    monkeypatch.setitem(command.RECIPES, "toy", dataclasses.replace(TOY, run=run))
    monkeypatch.setenv("TORCHPISA_DATA", "there")
    command.main(["toy", "--only", "flat", "--device", "cpu"])
    command.main(["toy", "--only", "steep", "--device", "cpu", "--data", "here"])
    assert seen == ["there", "here"]


@pytest.mark.usefixtures("toy")
def test_jobs_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["toy", "--jobs", "0"])
    assert "--jobs must be >= 1, got 0" in capsys.readouterr().err


def test_recipe_without_options_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["least_squares", "--help"])
    text = capsys.readouterr().out
    assert "--jobs" in text
    assert "--device" not in text
    assert "--data" not in text


def test_interrupted_run_is_not_in_the_log(tmp_path: Path) -> None:
    runs = Runs(climb, Size(3), PLAN, tmp_path, {"device": "cpu", "data": ""})
    runs.run_missing(["flat"])
    assert runs.log("flat") is not None
    text = runs.path("flat").read_text(encoding="utf-8")
    runs.path("flat").write_text(text[: text.rindex('{"seconds')], encoding="utf-8")
    assert runs.log("flat") is None


def test_lines_are_in_the_log_while_the_run_goes_on(tmp_path: Path) -> None:
    path, seen = tmp_path / "run.jsonl", []

    def lines() -> Iterator[Line]:
        for epoch in (1, 2, 3):
            seen.append(path.read_text(encoding="utf-8").count("\n"))
            yield {"epoch": epoch}

    logs.record(path, {}, lines(), lambda line: None)
    assert seen == [1, 2, 3]  # the header, and what was yielded before


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", seen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for jobs in (2, 3, 16):
        share_threads(jobs)
    assert seen == [4, 2, 1]


# Time limits, bars, TensorBoard


def test_no_run_is_started_after_the_time_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"device": "cpu", "data": ""}
    runs = Runs(climb, Size(3), PLAN, tmp_path, options, deadline=time.time() - 1)
    runs.run_missing(list(PLAN))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("not done within the time limit") == len(PLAN)
    dataclasses.replace(runs, deadline=time.time() + 600).run_missing(list(PLAN))
    assert runs.log("steep") is not None


def test_a_run_stops_at_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("recipes.execution.time.time", lambda: next(now))
    options = {"device": "cpu", "data": ""}
    runs = Runs(climb, Size(50), {"flat": Slope(0.0)}, tmp_path, options, deadline=10)
    runs.run_missing(["flat"])
    assert runs.log("flat") is None  # it has no end
    assert 1 < logged_lines(runs.path("flat")) < 50


@pytest.mark.usefixtures("toy")
def test_time_limit_must_be_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["toy", "--time-limit", "-3"])
    assert "must be a positive number of seconds, got '-3'" in capsys.readouterr().err


@pytest.mark.usefixtures("toy")
def test_runs_only_neither_checks_nor_draws(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["toy", "--device", "cpu", "--runs-only"])
    assert "holds" not in capsys.readouterr().out
    assert len(load()["runs"]) == 3
    assert not Path("runs/small/toy.svg").exists()


@pytest.mark.usefixtures("toy")
def test_no_runs_takes_what_the_logs_have() -> None:
    command.main(["toy", "--device", "cpu", "--only", "steep"])
    Path("runs/small/toy.json").unlink()
    command.main(["toy", "--device", "cpu", "--no-runs"])
    assert list(load()["runs"]) == ["steep"]
    assert load()["missing"] == ["flat", "steeper"]


def test_bar_estimates_what_is_left() -> None:
    assert progress_text(5, 20, 60.0) == "[#####...............] 5/20, 3:00 left  "
    assert progress_text(0, 20, 60.0).startswith("[....................] 0/20, -:-- left")
    assert progress_text(20, 20, 60.0).startswith("[####################] 20/20, 0:00 left")
    assert [format_duration(seconds) for seconds in (9, 61, 3725)] == ["0:09", "1:01", "1:02:05"]


def test_bar_is_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"device": "cpu", "data": ""}
    runs = Runs(climb, Size(3), PLAN, tmp_path, options, length=lambda settings: 3)
    runs.run_missing(["flat"])
    assert "#" not in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    runs.run_missing(["steep"])
    shown = capsys.readouterr().out
    assert "[#######.............] 1/3" in shown
    assert "[####################] 3/3, 0:00 left  step 2  height 4" in shown


def test_tensorboard_has_what_the_log_has(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"device": "cpu", "data": ""}
    runs = Runs(climb, Size(3), PLAN, tmp_path / "logs", options, tensorboard=tmp_path / "board")
    for _ in range(2):  # the second time, the first one's files are gone
        runs.run_missing(["steep"])
        runs.path("steep").unlink()
    events = accumulator.EventAccumulator(str(tmp_path / "board" / "steep"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("height")]
    assert points == [(0, 0.0), (1, 2.0), (2, 4.0)]
