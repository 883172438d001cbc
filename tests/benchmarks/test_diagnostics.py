"""The benchmark of what Diagnostics costs: what it saves and shows."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import diagnostics


def test_result_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "diagnostics_tiny.json"
    threads = torch.get_num_threads()
    options = "--device cpu --model tiny --batches 1 2 --every 5 --repeats 2 --threads 1 --save"
    try:
        diagnostics.main([*options.split(), str(path)])
    finally:
        torch.set_num_threads(threads)
    result = json.loads(path.read_text())
    assert {"config", "hardware", "versions", "rows"} == set(result)
    assert result["config"]["parameters"] == 7360
    assert [row["batches"] for row in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["with_ms"] / row["without_ms"], rel=1e-3)
        share = row["measurement_ms"] / (5 * row["batches"] * row["without_ms"])
        assert row["measurement_share"] == pytest.approx(share, rel=1e-3)
        assert len(row["with_samples_ms"]) == len(row["without_samples_ms"]) == 2
    shown = (tmp_path / "diagnostics.md").read_text()
    assert shown == capsys.readouterr().out
    assert shown.count("| tiny, 7,360 parameters, m = ") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device must be cuda or cpu, got tpu"),
        (["--every", "0"], "--every must be >= 1, got 0"),
        (["--batches", "0"], "--batches must be >= 1, got 0"),
        (["--save", "nowhere/a.json"], "--save must be in a folder that exists"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        diagnostics.main(["--device", "cpu", *options])
    assert message in capsys.readouterr().err
