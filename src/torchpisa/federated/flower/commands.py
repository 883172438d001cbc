"""The commands behind `python -m torchpisa.federated.flower`."""

import argparse
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

import torch

from torchpisa.federated.durable_files import DamagedFileError
from torchpisa.federated.flower import checkpoint as checkpoints
from torchpisa.federated.flower.checkpoint import Checkpoint, InUseError
from torchpisa.federated.flower.client_memory import training_folder
from torchpisa.federated.trust.ledger import without_contribution

__all__ = ["main"]

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


class CommandError(Exception):
    """Raised if a command cannot be carried out."""


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchpisa.federated.flower",
        description="Operate a federation on Flower.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_gate(commands)
    _add_checkpoint(commands)
    _add_trainings(commands)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except (CommandError, DamagedFileError, InUseError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _add_gate(commands: Commands) -> None:
    gate = commands.add_parser(
        "gate",
        help="let SuperNodes through to a SuperLink on the loopback interface, and nothing else",
    )
    gate.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    gate.add_argument("--port", type=int, required=True, help="port that SuperNodes connect to")
    gate.add_argument("--superlink", required=True, help="host:port of the SuperLink")
    gate.add_argument("--root-certificates", type=Path, required=True, help="ca.crt")
    gate.add_argument("--ssl-certfile", type=Path, required=True, help="server.crt")
    gate.add_argument("--ssl-keyfile", type=Path, required=True, help="server.key")
    gate.add_argument(
        "--max-reply",
        type=_bytes,
        default="256M",
        help="bytes that a SuperNode may send per message, as 256M (the default): give it twice "
        "the size of the model, four times for Scaffold",
    )
    gate.set_defaults(run=_gate)


def _gate(chosen: argparse.Namespace) -> None:
    from torchpisa.federated.flower.gate import run_gate

    run_gate(
        chosen.superlink,
        host=chosen.host,
        port=chosen.port,
        root_certificates=chosen.root_certificates.expanduser(),
        certificate=chosen.ssl_certfile.expanduser(),
        key=chosen.ssl_keyfile.expanduser(),
        max_reply=chosen.max_reply,
    )


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"a number of bytes as 500000, 64M or 1G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


# On the server, between two runs


def _add_checkpoint(commands: Commands) -> None:
    texts: dict[str, tuple[Callable[[Checkpoint, str], None], str]] = {
        "evict": (_evict, "take a client out, with all it has contributed, and keep it out"),
        "admit": (_readmit, "let a client in again that was evicted, as a newcomer"),
        "restart": (_restart, "start a client anew that has lost its memory, as a newcomer"),
        "release": (_release, "let another key use a client's name: the next that claims it"),
    }
    for name, (change, text) in texts.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("checkpoint", type=Path, help="the server's")
        command.add_argument("client", help="its name")
        command.set_defaults(run=_changes_checkpoint(name, change))
    show = commands.add_parser("show", help="list the clients of a checkpoint")
    show.add_argument("checkpoint", type=Path, help="the server's")
    show.set_defaults(run=_show)
    export = commands.add_parser("export", help="write the global weights as a state_dict")
    export.add_argument("checkpoint", type=Path, help="the server's")
    export.add_argument("file", type=Path, help="for model.load_state_dict(torch.load(file))")
    export.set_defaults(run=_export)


def _changes_checkpoint(
    name: str, change: Callable[[Checkpoint, str], None]
) -> Callable[[argparse.Namespace], None]:
    def run(chosen: argparse.Namespace) -> None:
        _read(chosen.checkpoint)  # first, because locking makes files
        with checkpoints.locked(chosen.checkpoint, f"of the command {name!r}"):
            saved = _read(chosen.checkpoint)
            change(saved, chosen.client)
            checkpoints.write(chosen.checkpoint, saved)
        print(f"{name}: client {chosen.client!r} of training {saved.training}")

    return run


def _read(file: Path) -> Checkpoint:
    saved = checkpoints.read(file)
    if saved is None:
        raise CommandError(f"checkpoint must be a file, got {file}, which does not exist")
    return saved


def _withdraw(saved: Checkpoint, name: str, leaves: bool) -> None:
    """Take a client's contribution out of the server's memory."""
    client = _client(saved, name)
    if client.accepted >= 0 and saved.server.memory and name not in saved.ledger:
        raise CommandError(
            f"what client {name!r} has contributed is not known: the training must run with "
            "FederatedStrategy(ledger=True) from its start"
        )
    before = sum(other.weight for other in saved.clients.values())
    after = before - client.weight if leaves else before
    contribution = saved.ledger.pop(name, {})
    saved.server = without_contribution(saved.server, contribution, client.weight, before, after)


def _client(saved: Checkpoint, name: str) -> checkpoints.ClientRecord:
    if name not in saved.clients:
        raise CommandError(f"client must be one of {sorted(saved.clients)}, got {name!r}")
    return saved.clients[name]


def _evict(saved: Checkpoint, name: str) -> None:
    _withdraw(saved, name, leaves=True)
    saved.lives[name] = saved.clients.pop(name).life + 1
    saved.evicted = sorted({*saved.evicted, name})


def _readmit(saved: Checkpoint, name: str) -> None:
    if name not in saved.evicted:
        raise CommandError(f"client must be one of those evicted, {saved.evicted}, got {name!r}")
    saved.evicted.remove(name)


def _restart(saved: Checkpoint, name: str) -> None:
    _withdraw(saved, name, leaves=False)
    client = _client(saved, name)
    client.accepted, client.life = -1, client.life + 1


def _release(saved: Checkpoint, name: str) -> None:
    _client(saved, name).key = None


def _show(chosen: argparse.Namespace) -> None:
    saved = _read(chosen.checkpoint)
    total = sum(client.weight for client in saved.clients.values())
    print(
        f"training {saved.training}, {saved.server.iteration} rounds, "
        f"generation {saved.generation} by run {saved.run}"
    )
    print(f"{'client':<16}{'samples':>10}{'share':>9}{'last update':>13}  key")
    for name, client in sorted(saved.clients.items()):
        share, key = client.weight / total, (client.key or "none")[:12]
        last = str(client.accepted + 1) if client.accepted >= 0 else "none"
        print(f"{name:<16}{client.samples:>10}{share:>9.1%}{last:>13}  {key}")
    for name in saved.evicted:
        print(f"{name:<16}evicted")


def _export(chosen: argparse.Namespace) -> None:
    saved = _read(chosen.checkpoint)
    with chosen.file.open("wb") as stream:
        torch.save(saved.server.weights, stream)
    print(f"export: weights after round {saved.server.iteration} in {chosen.file}")


# On a client


def _add_trainings(commands: Commands) -> None:
    trainings = commands.add_parser("trainings", help="list the trainings in a client's folder")
    trainings.add_argument("folder", type=Path, help="folder= of the node config")
    trainings.set_defaults(run=_trainings)
    remove = commands.add_parser("remove", help="remove a training from a client's folder")
    remove.add_argument("folder", type=Path, help="folder= of the node config")
    remove.add_argument("training", help="as `trainings` lists it")
    remove.set_defaults(run=_remove)


def _trainings(chosen: argparse.Namespace) -> None:
    print(f"{'training':<34}{'last change':<18}{'MB':>9}  clients")
    folders = [folder for folder in chosen.folder.iterdir() if folder.is_dir()]
    for folder in sorted(folders, key=lambda folder: folder.stat().st_mtime):
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        changed = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
        clients = sorted(unquote(file.stem) for file in folder.glob("*.pt"))
        print(f"{unquote(folder.name):<34}{changed:<18}{size:>9.1f}  {', '.join(clients)}")


def _remove(chosen: argparse.Namespace) -> None:
    folder = training_folder(chosen.folder, chosen.training)
    if not folder.is_dir():
        raise CommandError(
            f"training must be one of those in {chosen.folder}, got {chosen.training!r}"
        )
    strange = [file.name for file in folder.iterdir() if ".pt" not in file.name]
    if strange:
        raise CommandError(f"{folder} holds files that are not of torchpisa: {strange[:5]}")
    shutil.rmtree(folder)
