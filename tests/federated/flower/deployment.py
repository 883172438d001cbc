"""A Flower deployment on this machine: TLS, registered node keys, real processes.

Everything listens on 127.0.0.1, ends in time, and no process is left behind.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, TracebackType

from torchpisa.federated.flower import files

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "flower"

MARK = "TORCHPISA_TEST_DEPLOYMENT"
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.4",
    "OMP_NUM_THREADS": "1",
}


def example_module(file: str) -> ModuleType:
    """A file of the example, as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, EXAMPLE / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Deployment:
    """A SuperLink and SuperNodes, started and killed one by one.

    Args:
        folder: where keys, logs and checkpoints go.
        nodes: how many node keys are made; `register` says which of them are made known.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.port = free_port()
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        certificates = example_module("certificates.py")
        certificates.make_certificates(self.secrets, ["localhost", "127.0.0.1"])
        for number in range(nodes):
            certificates.make_node_key(self.secrets / f"node-{number}")
        self.environment = {
            **ENVIRONMENT,
            MARK: self.mark,
            "FLWR_HOME": str(folder / "home"),
        }
        self._configure()
        self.pids: dict[str, int] = {}

    def _configure(self) -> None:
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f"""[superlink]
default = "test"

[superlink.test]
address = "127.0.0.1:{self.port}"
root-certificates = "{self.secrets / "ca.crt"}"
"""
        )

    def __enter__(self) -> "Deployment":
        with (self.folder / "nursery.log").open("w") as log:
            self._nursery = subprocess.Popen(
                [sys.executable, "-m", "tests.federated.flower.nursery"],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._answer("ready")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._nursery.kill()
        self._nursery.communicate()
        end_marked(self.mark)

    def _answer(self, expected: str | None = None) -> str:
        line = self._nursery.stdout.readline().strip()
        if not line or (expected and line != expected):
            raise RuntimeError(f"the nursery said {line!r}:\n{self.log('nursery')}")
        return line

    def fork(self, role: str, name: str, *arguments: object) -> int:
        """Start a process of Flower; its output goes to the log `name`."""
        order = {
            "role": role,
            "arguments": [str(argument) for argument in arguments],
            "environment": self.environment,
            "log": str(self.folder / f"{name}.log"),
        }
        self._nursery.stdin.write(json.dumps(order) + "\n")
        self._nursery.stdin.flush()
        self.pids[name] = int(self._answer())
        return self.pids[name]

    def log(self, name: str) -> str:
        """What a process has written so far."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def kill(self, name: str) -> None:
        """SIGKILL a process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pids[name], signal.SIGKILL)
        self.wait(lambda: not _alive(self.pids[name]), f"{name} to die", 10)

    def superlink(self) -> None:
        """Start the SuperLink, and wait until it listens. What it knows dies with it."""
        self.fork(
            "flower-superlink",
            "superlink",
            *("--host", "127.0.0.1", "--port", self.port),
            *("--ssl-certfile", self.secrets / "server.crt"),
            *("--ssl-keyfile", self.secrets / "server.key"),
            *("--ssl-ca-certfile", self.secrets / "ca.crt"),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--isolation", "process"),
        )
        self.wait(lambda: _listens(self.port), "the SuperLink", 30)

    def register(self, number: int) -> None:
        """Make a node's key known to the SuperLink."""
        self.flwr("supernode", "register", self.secrets / f"node-{number}.pub", "test")

    def node(self, number: int, key: int | None = None) -> None:
        """Start SuperNode `number`, with a key of another one if `key` says so."""
        secret = self.secrets / f"node-{number if key is None else key}"
        self.fork(
            "flower-supernode",
            f"node-{number}",
            *("--root-certificates", self.secrets / "ca.crt"),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", secret),
            *("--node-config", f'partition-id={number} folder="{self.memory}"'),
            *("--isolation", "process", "--host", "127.0.0.1", "--port", free_port()),
        )

    def train(self, app: Path = EXAMPLE, **config: object) -> None:
        """Start a run of an app; `iteration` tells how far it is."""
        config = {"checkpoint": str(self.checkpoint), "poll": 0.5, **config}
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        said = self.flwr("run", app, "test", "--run-config", overrides)
        if "Successfully started run" not in said:
            raise RuntimeError(said)

    @property
    def checkpoint(self) -> Path:
        """The server's."""
        return self.folder / "server.pt"

    @property
    def memory(self) -> Path:
        """The folder of all clients."""
        return self.folder / "memory"

    @property
    def iteration(self) -> int:
        """How many rounds are done."""
        saved = files.load(self.checkpoint)
        return 0 if saved is None else saved["server"]["iteration"]

    def reach(self, iteration: int, seconds: float) -> None:
        """Wait until so many rounds are done."""
        self.wait(lambda: self.iteration >= iteration, f"round {iteration}", seconds)

    def flwr(self, *arguments: object) -> str:
        """Run the command line of Flower to its end; what it says."""
        name = f"flwr-{uuid.uuid4().hex[:8]}"
        pid = self.fork("flwr", name, *arguments)
        self.wait(lambda: not _alive(pid), f"flwr {arguments[0]}", 30)
        return self.log(name)

    def wait(self, done: Callable[[], bool], what: str, seconds: float) -> None:
        """Until `done()`; otherwise the logs are in the error."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                logs = "\n".join(
                    f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"
                    for file in sorted(self.folder.glob("*.log"))
                )
                raise TimeoutError(f"waited {seconds} s for {what}\n{logs}")
            time.sleep(0.05)


def free_port() -> int:
    """A port on this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end_marked(mark: str) -> None:
    """Kill all processes that have the mark in their environment."""
    for _ in range(50):
        left = _marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def _marked(mark: str) -> Mapping[int, str]:
    """Processes with the mark in their environment, and what they are."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended, or is not ours
            continue
    return found
