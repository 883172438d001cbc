"""The server's checkpoint: one run at a time; the last writer is noticed."""

import shutil

import pytest
from flwr.supercore.task_identity import TaskIdentity

from tests.federated.flower.fake import (
    federation,
    imbalance,
    start,
    strategy,
)
from torchpisa.federated import FedAvg, durable_files
from torchpisa.federated.flower import (
    InUseError,
)


def test_second_run_is_refused_with_the_id_of_the_first(tmp_path):
    grid, server = federation(tmp_path / "clients"), strategy(tmp_path / "server.pt")
    TaskIdentity.run_id = 4711

    def evaluate(number, _):
        if number == 2:
            second = federation(tmp_path / "clients")
            TaskIdentity.run_id = 4712
            with pytest.raises(InUseError, match="run 4712 is refused: run 4711 "):
                start(second, strategy(tmp_path / "server.pt"))

    start(grid, server, 4, evaluate_fn=evaluate)
    assert server.server.iteration == 4
    assert imbalance(server, tmp_path / "clients") < 1e-6
    start(grid, strategy(tmp_path / "server.pt"), 5)  # afterwards it is free


def test_a_writer_that_the_lock_has_not_kept_out(tmp_path):
    """On a file system without locks, the run that has fallen behind must not write."""
    algorithm = FedAvg(lr=0.1)  # its clients have no memory that would notice
    grid = federation(None, algorithm=algorithm)
    server, other = strategy(tmp_path / "server.pt", algorithm), tmp_path / "other.pt"

    def evaluate(number, _):
        if number == 2:
            shutil.copy(tmp_path / "server.pt", other)
            start(federation(None, algorithm=algorithm), strategy(other, algorithm), 4)
            shutil.copy(other, tmp_path / "server.pt")

    with pytest.raises(InUseError, match=r"was generation 2 .* is generation 4 now"):
        start(grid, server, 4, evaluate_fn=evaluate)
    assert durable_files.load(tmp_path / "server.pt") is not None
    assert durable_files.generation(tmp_path / "server.pt") == 4
