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
from tests.federated.flower.ports import free_port
from torchpisa.federated import SISA, FullGradient, Simulation
from torchpisa.federated.flower import files

pytestmark = pytest.mark.xdist_group("flower")

BIN = Path(sys.executable).parent


def test_simulation_engine_equals_ours(tmp_path):
    pytest.importorskip("ray", reason="needs Ray: pip install torchpisa[flower]")
    rounds, port, mark = 3, free_port(), uuid.uuid4().hex
    (tmp_path / "config.toml").write_text(
        f'[superlink.test]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        **ENVIRONMENT,
        MARK: mark,
        "FLWR_HOME": str(tmp_path),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "RAY_TMPDIR": "/tmp",  # its sockets need a short path
    }
    superlink = [
        *(BIN / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"),
        *("--port", str(port), "--disable-runtime-dependency-installation"),
    ]
    run = [
        *(BIN / "flwr", "run", EXAMPLE, "test", "--federation-config", "num-supernodes=3"),
        *("--run-config", f'rounds={rounds} poll=0.1 checkpoint="{tmp_path / "server.pt"}"'),
    ]
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.Popen(superlink, env=environment, stdout=output, stderr=output)
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
    saved = files.load(tmp_path / "server.pt")
    for name, expected in alone.server.weights.items():
        gap = (saved["server"]["weights"][name] - expected).norm() / expected.norm()
        assert gap <= 1e-5


def _submit(command, environment):
    """The SuperLink may not listen yet."""
    end = time.monotonic() + STALL
    while True:
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        if "Successfully started run" in found.stdout:
            return
        if time.monotonic() > end:
            raise RuntimeError(found.stdout + found.stderr)
        time.sleep(0.5)


def _wait(checkpoint, rounds, log):
    """Until so many rounds are done, as long as something is logged or done."""
    moved, seen = time.monotonic(), None
    while (saved := files.load(checkpoint)) is None or saved["server"]["iteration"] < rounds:
        state = saved and saved["server"]["iteration"], log.stat().st_size
        if state != seen:
            seen, moved = state, time.monotonic()
        if time.monotonic() > moved + STALL:
            raise TimeoutError(log.read_text(errors="replace")[-5000:])
        time.sleep(0.2)
