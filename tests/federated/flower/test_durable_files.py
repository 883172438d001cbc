"""Files: nobody else may read them, and damage is noticed."""

import os
import stat

import pytest
import torch

from tests.federated.flower.fake import (
    federation,
    imbalance,
    start,
    strategy,
)
from torchpisa.federated import durable_files
from torchpisa.federated.flower import (
    DamagedFileError,
)


@pytest.mark.skipif(os.name != "posix", reason="modes of files")
def test_nobody_else_may_read_the_files(tmp_path):
    folder = tmp_path / "deep" / "er"
    start(federation(folder / "clients"), strategy(folder / "server.pt"), 2)
    for path in (tmp_path / "deep").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


def test_every_flipped_byte_is_noticed(tmp_path):
    file = tmp_path / "server.pt"
    durable_files.save(file, {"server": {"w": torch.randn(20)}, "clients": {"a": 1}}, 3)
    content = file.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        file.write_bytes(flipped)
        with pytest.raises(DamagedFileError, match=str(file)):
            durable_files.load(file)
    for size in (0, 10, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(DamagedFileError, match=str(file)):
            durable_files.load(file)
    file.write_bytes(content)
    assert durable_files.load(file)["clients"] == {"a": 1}


def test_last_two_generations_are_kept(tmp_path):
    file = tmp_path / "server.pt"
    grid = federation(tmp_path / "clients")
    start(grid, strategy(file), 3)
    assert durable_files.load(durable_files.previous(file))["server"]["iteration"] == 2
    file.write_bytes(b"junk")
    with pytest.raises(DamagedFileError, match=r"server\.pt is damaged.*server\.pt\.previous"):
        start(grid, strategy(file), 4)
    durable_files.previous(file).replace(file)
    # The clients have not heard of round 3 being counted, and go back with the server.
    server = start(grid, strategy(file), 6)
    assert all(entry.absent == [] for entry in server.rounds)
    assert imbalance(server, tmp_path / "clients") < 1e-6
