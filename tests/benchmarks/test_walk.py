"""The files and frames that a step crosses."""

import pytest

from benchmarks import walk
from torchpisa import MISA, NSISA, SISA


@pytest.mark.parametrize("make", [SISA, NSISA, MISA])
def test_a_step_stays_within_its_limits(make: type) -> None:
    files, frames = walk.LIMITS[make.__name__]
    seen = walk.step_of(make)
    assert 5 < seen.files <= files
    assert 50 < seen.frames <= frames


@pytest.mark.usefixtures("forked")
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    walk.main(["-v"])
    printed = capsys.readouterr().out
    for name in ("SISA (at most 8, 100)", "SISA, DDP round", "SISA, federated round"):
        (row,) = [line for line in printed.splitlines() if line.startswith(f"| {name} |")]
        assert all(int(cell) > 2 for cell in row.split("|")[2:5])
    assert "distributed/process_group.py" in printed
