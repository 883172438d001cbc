"""The saved errors of the resolvent are those of the matrices that the script makes."""

import json
from pathlib import Path

from benchmarks import resolvent

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_errors_are_those_of_an_svd():
    """Within three times its own, as measured."""
    for row in json.loads((RESULTS / "resolvent_cpu.json").read_text())["errors"]:
        assert max(row["ratio"].values()) <= 3
    assert all(len(s) == 8 for s in resolvent.spectra(8))
