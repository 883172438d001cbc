"""Two processes train one model: as one process would, and only the first one writes."""

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from recipes import __main__ as command
from recipes import ranks
from recipes.language import RECIPE
from recipes.language.config import PRESETS, Config, Trial, plan, trial
from recipes.language.run import run, share_work
from tests.distributed import processes
from tests.distributed.launch import forked

TRIALS = (
    trial("nsisa"),  # one batch, whose sequences are shared; the embedding is AdamW's
    trial("nsisa", 4, label="nsisa_nodes"),  # two batches with their duals in each process
    trial("misa", 4, rest="own"),
)


def config(*trials: Trial) -> Config:
    changes = {"steps": 6, "sequences": 8, "micro": 4, "validation": 5}
    every = {"log_every": 2, "validate_every": 2, "save_every": 2}
    return dataclasses.replace(PRESETS["quick"], trials=trials, **changes, **every)


CONFIG = config(*TRIALS)
pytestmark = pytest.mark.xdist_group("ranks")


def train(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    runs = plan(CONFIG)
    return {name: list(run(CONFIG, runs[name], device="cpu")) for name in names}


@pytest.fixture(scope="module")
def together() -> list[dict[str, list[dict[str, Any]]]]:
    """Return the lines of all trials from each of two processes."""
    return list(processes.run(train, 2, list(plan(CONFIG))))


def test_two_processes_have_the_losses_of_one(together: Any) -> None:
    names = list(plan(CONFIG))
    alone = train(names)
    for of_rank in together:
        for name in names:
            for key in ("loss", "val_loss", "test_loss"):
                expected = [line[key] for line in alone[name] if line[key] is not None]
                losses = [line[key] for line in of_rank[name] if line[key] is not None]
                assert losses == pytest.approx(expected, rel=1e-4)


def interrupt(folder: str) -> list[dict[str, Any]]:
    settings = plan(CONFIG)["nsisa_nodes_m4_seed0"]
    stopped = run(CONFIG, settings, device="cpu", checkpoints=folder)
    list(itertools.islice(stopped, 3))  # steps 0, 2 and 4; saved at 2 and 4
    stopped.close()
    files = sorted(path.name for path in Path(folder).iterdir())
    assert f"nsisa_nodes_m4_seed0.rank{ranks.rank()}of2.pt" in files
    return list(run(CONFIG, settings, device="cpu", checkpoints=folder))


def test_resumed_processes_are_bit_equal(together: Any, tmp_path: Path) -> None:
    whole, _ = together
    resumed, _ = processes.run(interrupt, 2, str(tmp_path))
    losses = [line["val_loss"] for line in resumed]
    assert losses == [line["val_loss"] for line in whole["nsisa_nodes_m4_seed0"]]


def use_command(folder: str) -> None:
    """Do a short run by the command, each process with a folder of its own."""
    command.RECIPES["language"] = dataclasses.replace(RECIPE, presets={"quick": config(TRIALS[0])})
    out = str(Path(folder) / os.environ["RANK"])
    command.main(["language", "--device", "cpu", "--out", out, "--runs-only"])


def test_command_in_two_processes_and_who_writes(tmp_path: Path) -> None:
    done = forked(Path(__file__).with_name("ranks_worker.py"), tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.json*"))
    assert files == ["0/language.json", "0/language/nsisa_m1_seed0.jsonl"]
    assert done.stdout.count("nsisa_m1_seed0: ") == 1


def test_work_is_shared_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_work(4, 16) == (range(4), False)
    monkeypatch.setattr(ranks, "count", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert share_work(4, 16) == (range(2, 4), False)
    assert share_work(1, 16) == (range(1), True)
    with pytest.raises(ValueError, match="2 processes must divide the batches of a step, 1, or"):
        share_work(1, 15)


def test_other_recipes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--out", str(tmp_path), "--runs-only"]
    with pytest.raises(SystemExit, match="least_squares runs in one process"):
        command.main(["least_squares", *words])
    with pytest.raises(SystemExit):
        command.main(["language", "--jobs", "2", "--device", "cpu", *words])
