"""Benchmarks of several processes, without the imports of each of them."""

from functools import partial

import pytest
from torch.multiprocessing import start_processes

from tests.distributed.processes import CONTEXT


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let benchmarks fork their processes from one that has imported torch."""
    start = partial(start_processes, start_method=CONTEXT.get_start_method())
    monkeypatch.setattr("benchmarks.distributed.processes.start_processes", start)
