"""The example in Flower's simulation engine, with its commands as they are."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.federated.flower.deployment import (
    ENVIRONMENT,
    EXAMPLE,
    MARK,
    STALL,
    end_marked,
    example_module,
)
from tests.federated.flower.ports import free_port, listens
from torchpisa.federated import SISA, FullGradient, Simulation, durable_files

pytestmark = pytest.mark.xdist_group("flower")

BIN = Path(sys.executable).parent


def test_simulation_engine_equals_ours(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install torchpisa[flower]")
    rounds, mark = 3, uuid.uuid4().hex
    environment = {
        **os.environ,
        **ENVIRONMENT,
        MARK: mark,
        "FLWR_HOME": str(tmp_path),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_TMPDIR": "/tmp",  # its sockets need a short path
    }
    run = [
        *(BIN / "flwr", "run", EXAMPLE, "test", "--federation-config", "num-supernodes=3"),
        *("--run-config", f'rounds={rounds} poll=0.1 checkpoint="{tmp_path / "server.pt"}"'),
    ]
    log = tmp_path / "log"
    server = _superlink(tmp_path, log, environment)
    try:
        _submit(run, environment)
        _wait(tmp_path / "server.pt", rounds, log)
    finally:
        end_marked(mark)
        server.wait()
    task = example_module("federated_digits/task.py")
    contexts = [SimpleNamespace(node_config={"partition-id": i}) for i in range(3)]
    alone = Simulation(
        task.model(),
        [task.data(context) for context in contexts],
        SISA(sigma=0.3, rho=10.0, local=FullGradient(30)),
    )
    alone.run(rounds, progress=False)
    saved = durable_files.load(tmp_path / "server.pt")
    for name, expected in alone.server.weights.items():
        gap = (saved["server"]["weights"][name] - expected).norm() / expected.norm()
        assert gap <= 1e-5


def _superlink(folder, log, environment):
    """Start a SuperLink, on another port if the first was taken; its process."""
    for _ in range(5):
        port = free_port()
        command = [
            *(BIN / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"),
            *("--port", str(port), "--disable-runtime-dependency-installation"),
        ]
        with log.open("w") as output:
            server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        end = time.monotonic() + STALL
        while not listens(port) and server.poll() is None and time.monotonic() < end:
            time.sleep(0.2)
        # Somebody else may listen there, and ours is dead or about to be.
        if listens(port) and "address already in use" not in log.read_text():
            (folder / "config.toml").write_text(
                f'[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
            )
            return server
        server.kill()
        server.wait()
    raise RuntimeError(log.read_text())


def _submit(command, environment):
    """Run the command until the SuperLink, which may be busy, accepts it."""
    end = time.monotonic() + STALL
    while True:
        submitted = subprocess.run(command, env=environment, capture_output=True, text=True)
        if "Successfully started run" in submitted.stdout:
            return
        if time.monotonic() > end:
            raise RuntimeError(submitted.stdout + submitted.stderr)
        time.sleep(0.5)


def _wait(checkpoint, rounds, log):
    """Wait for `rounds` rounds, as long as something is logged or done."""
    moved, seen = time.monotonic(), None
    while (saved := durable_files.load(checkpoint)) is None or saved["server"][
        "iteration"
    ] < rounds:
        state = saved and saved["server"]["iteration"], log.stat().st_size
        if state != seen:
            seen, moved = state, time.monotonic()
        if time.monotonic() > moved + STALL:
            raise TimeoutError(log.read_text(errors="replace")[-5000:])
        time.sleep(0.2)
