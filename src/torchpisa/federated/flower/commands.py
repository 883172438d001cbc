"""The commands behind `python -m torchpisa.federated.flower`."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torchpisa.federated.flower",
        description="Operate a federation on Flower.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_gate(commands)
    chosen = parser.parse_args(arguments)
    return int(chosen.run(chosen))


def _add_gate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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


def _gate(chosen: argparse.Namespace) -> int:
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
    return 0


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"a number of bytes as 500000, 64M or 1G, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]
