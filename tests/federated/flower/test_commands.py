"""The command: trainings of a folder, eviction, and what it says to mistakes."""

import pytest
import torch

from tests.federated.flower.fake import federation, model, start, strategy
from torchpisa.federated.flower import checkpoint
from torchpisa.federated.flower.commands import main as command


def test_commands_explain_themselves(tmp_path, capsys):
    file = tmp_path / "server.pt"
    assert command(["evict", str(file), "1"]) == 1
    assert "does not exist" in capsys.readouterr().err
    start(federation(tmp_path / "clients"), strategy(file), 2)
    assert command(["evict", str(file), "nobody"]) == 1
    assert "must be one of ['0', '1', '2', '3'], got 'nobody'" in capsys.readouterr().err
    with checkpoint.locked(file, "12"):
        assert command(["evict", str(file), "1"]) == 1
    assert "run 12 " in capsys.readouterr().err
    assert command(["show", str(file)]) == 0
    said = capsys.readouterr().out
    assert "2 rounds" in said
    assert "34.4%" in said
    start(federation(None), strategy(tmp_path / "no.pt", ledger=False), 2)
    assert command(["evict", str(tmp_path / "no.pt"), "1"]) == 1
    assert "ledger=True" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("evict", "no/server.pt", "1"),
        ("show", "no/server.pt"),
        ("show", "."),
        ("trainings", "no"),
        ("export", "server.pt", "no/model.pt"),
        ("export", "server.pt", "."),
    ],
    ids=" ".join,
)
def test_wrong_paths(arguments, tmp_path, capsys, monkeypatch):
    """They are named in one line, and nothing is made at a path with a typing error."""
    monkeypatch.chdir(tmp_path)
    start(federation(None), strategy(tmp_path / "server.pt"), 1)
    capsys.readouterr()
    before = sorted(tmp_path.rglob("*"))
    assert command(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert arguments[-1 if arguments[0] == "export" else 1] in line
    assert sorted(tmp_path.rglob("*")) == before


def test_weights_are_exported(tmp_path, capsys):
    server = start(federation(tmp_path / "clients"), strategy(tmp_path / "server.pt"), 2)
    assert command(["export", str(tmp_path / "server.pt"), str(tmp_path / "model.pt")]) == 0
    assert "weights after round 2" in capsys.readouterr().out
    network = model()
    network.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    for name, weight in server.server.weights.items():
        assert torch.equal(network.get_parameter(name), weight)


def test_old_trainings_are_listed_and_removed(tmp_path, capsys):
    folder = tmp_path / "clients"
    grid = federation(folder)
    names = []
    for _ in range(2):
        server = start(grid, strategy(), 1)
        names.append(server._training)
    assert command(["trainings", str(folder)]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}" in said for name in names)
    assert "0, 1, 2, 3" in said
    assert command(["remove", str(folder), names[0]]) == 0
    assert [path.name for path in folder.iterdir()] == [names[1]]
    assert command(["remove", str(folder), ".."]) == 1
    assert "must be one of those in" in capsys.readouterr().err
    (folder / names[1] / "mine.txt").write_text("keep")
    assert command(["remove", str(folder), names[1]]) == 1
    assert (folder / names[1] / "mine.txt").exists()
