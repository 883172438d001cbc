"""A Flower deployment on this machine: a gate, TLS, registered node keys, real processes.

Everything listens on 127.0.0.1, on ports of its own, and no process is left behind. Waiting
follows progress: as long as rounds are closed or something is logged it goes on, and when nothing
has moved for a while the error holds the logs. So a busy machine makes a test slow, not red.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, TracebackType

from tests.federated.flower.ports import free_port, listens
from torchpisa.federated import durable_files

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "flower"

MARK = "TORCHPISA_TEST_DEPLOYMENT"
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    "OMP_NUM_THREADS": "1",
}

STALL = 120.0
"""Seconds without any progress after which a test gives up."""

LIMIT = 900.0
"""Seconds after which it gives up whatever moves."""

_POLLS = re.compile(rb".*(?:POST|GET) /v1/.*\n")
"""Lines that the SuperLink logs whether or not anything happens."""


def example_module(file: str) -> ModuleType:
    """Return a file of the example as a module."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, EXAMPLE / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Nursery:
    """The process that all others are forked from; importing torch and Flower takes long."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._log = folder / "nursery.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.federated.flower.nursery"],
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, MARK: self.mark},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._answer("ready")

    def fork(self, order: Mapping[str, object]) -> int:
        """Start a process and return its id, which is also that of its session."""
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self, expected: str | None = None) -> str:
        line = self._process.stdout.readline().strip()
        if not line or (expected and line != expected):
            raise RuntimeError(f"the nursery said {line!r}:\n{self._log.read_text()}")
        return line

    def close(self) -> None:
        """End it, and all that is left of what it has started."""
        self._process.kill()
        self._process.communicate()
        end_marked(self.mark)


class Deployment:
    """A SuperLink, its gate and SuperNodes, started and killed one by one.

    Args:
        folder: the folder of keys, logs and checkpoints.
        nodes: the number of node keys to make; `register` makes one known to the SuperLink.
        nursery: starts the processes.
        max_reply: of the gate.

    Attributes:
        checkpoint: the server's, of the training that was started last.
    """

    def __init__(self, folder: Path, nodes: int, nursery: Nursery, max_reply: str = "8M") -> None:
        self.folder = folder
        self.secrets = folder / "secrets"
        self.secrets.mkdir()
        certificates = example_module("certificates.py")
        certificates.make_certificates(self.secrets, ["localhost", "127.0.0.1"])
        for number in range(nodes):
            certificates.make_node_key(self.secrets / f"node-{number}")
        self.environment = {**ENVIRONMENT, "FLWR_HOME": str(folder / "home")}
        (folder / "home").mkdir()
        self.checkpoint = folder / "server.pt"
        self.pids: dict[str, int] = {}
        self._started: list[int] = []
        self._nursery = nursery
        self._max_reply = max_reply

    def connection(self, name: str, port: int) -> None:
        """Tell the `flwr` command of a SuperLink."""
        file = self.folder / "home" / "config.toml"
        old = file.read_text() if file.exists() else ""
        old = re.sub(rf"\[superlink\.{name}\]\n.*\n.*\n", "", old)
        file.write_text(
            f"""{old}[superlink.{name}]
address = "127.0.0.1:{port}"
root-certificates = "{self.secrets / "ca.crt"}"
"""
        )

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for _ in range(50):
            left = [pid for session in self._started for pid in _session(session)]
            if not left:
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def fork(self, role: str, name: str, *arguments: object) -> int:
        """Start a process of Flower, or of ours, with its output in the log `name`."""
        self.pids[name] = self._nursery.fork(
            {
                "role": role,
                "arguments": [str(argument) for argument in arguments],
                "environment": self.environment,
                "log": str(self.folder / f"{name}.log"),
            }
        )
        self._started.append(self.pids[name])
        return self.pids[name]

    def log(self, name: str) -> str:
        """Return what a process has written so far."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def kill(self, name: str) -> None:
        """SIGKILL a process and all that it has started."""
        for pid in _session(self.pids[name]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not any(_session(self.pids[name])), f"{name} to die")

    def superlink(self) -> None:
        """Start SuperLink and gate, and wait until they listen. What the link knows dies with it.

        A gate that is there already stays, with the port that nodes know.
        """
        self.port = self._serve(
            "flower-superlink",
            "superlink",
            *("--host", "127.0.0.1"),
            *("--ssl-certfile", self.secrets / "server.crt"),
            *("--ssl-keyfile", self.secrets / "server.key"),
            *("--ssl-ca-certfile", self.secrets / "ca.crt"),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
            *("--isolation", "process"),
            port=getattr(self, "port", None),
        )
        self.connection("test", self.port)
        if "gate" not in self.pids:
            self.door = self._serve(
                *("gate", "gate", "--host", "127.0.0.1", "--max-reply", self._max_reply),
                *("--superlink", f"127.0.0.1:{self.port}"),
                *("--root-certificates", self.secrets / "ca.crt"),
                *("--ssl-certfile", self.secrets / "server.crt"),
                *("--ssl-keyfile", self.secrets / "server.key"),
            )

    def _serve(self, role: str, name: str, *arguments: object, port: int | None = None) -> int:
        """Start a server, on another port if the first is taken, and return the port."""
        for _ in range(5):
            chosen = free_port() if port is None else port
            pid = self.fork(role, name, *arguments, "--port", chosen)
            self.wait(
                lambda pid=pid, chosen=chosen: listens(chosen) or not _alive(pid), f"the {name}"
            )
            # Somebody else may listen there, and ours is dead or about to be.
            if _alive(pid) and "address already in use" not in self.log(name):
                return chosen
            self.kill(name)
            (self.folder / f"{name}.log").unlink()
        raise RuntimeError(f"no port for {name}:\n{self._logs()}")

    def register(self, number: int) -> None:
        """Make a node's key known to the SuperLink."""
        for _ in range(5):
            said = self.flwr("supernode", "register", self.secrets / f"node-{number}.pub", "test")
            if "successfully" in said.lower():
                return
            # One that has just begun to listen may be too busy for the command's patience.
            if "SuperLink is unavailable" not in said:
                break
        raise RuntimeError(said)

    def node(
        self,
        number: int,
        *,
        partition: int | None = None,
        key: Path | None = None,
        ready: bool = True,
    ) -> None:
        """Start SuperNode `number`, and wait until it is connected if it is to be `ready`."""
        before = self.log(f"node-{number}").count("SuperNode ID:")
        secret = self.secrets / f"node-{number}" if key is None else key
        partition = number if partition is None else partition
        self.fork(
            "flower-supernode",
            f"node-{number}",
            *("--root-certificates", self.secrets / "ca.crt"),
            *("--superlink", f"127.0.0.1:{self.door}"),
            *("--auth-supernode-private-key", secret),
            *("--node-config", f'partition-id={partition} folder="{self.memory}"'),
            *("--isolation", "process", "--host", "127.0.0.1", "--port", "0"),
        )
        if ready:
            self.wait(
                lambda: self.log(f"node-{number}").count("SuperNode ID:") > before,
                f"node {number} to connect",
            )

    def nodes(self, count: int) -> None:
        """Register and start so many, one after the other: two cores cannot start all at once."""
        for number in range(count):
            self.register(number)
            self.node(number)

    def train(self, app: Path = EXAMPLE, *, checkpoint: str = "server.pt", **config: object) -> str:
        """Start a run of an app and return its id; `iteration` says how many rounds are done."""
        self.checkpoint = self.folder / checkpoint
        config = {"checkpoint": str(self.checkpoint), "poll": 0.1, **config}
        overrides = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        said = self.flwr("run", app, "test", "--run-config", overrides)
        started = re.search(r"Successfully started run (\d+)", said.replace("\n", " "))
        if not started:
            raise RuntimeError(said)
        return started[1]

    @property
    def memory(self) -> Path:
        """Return the folder of all clients."""
        return self.folder / "memory"

    @property
    def iteration(self) -> int:
        """Return the number of rounds done."""
        saved = durable_files.load(self.checkpoint)
        return 0 if saved is None else saved["server"]["iteration"]

    def reach(self, iteration: int) -> None:
        """Wait until so many rounds are done."""
        self.wait(lambda: self.iteration >= iteration, f"round {iteration}")

    def flwr(self, *arguments: object) -> str:
        """Run the command line of Flower to its end and return its output."""
        name = f"flwr-{uuid.uuid4().hex[:8]}"
        pid = self.fork("flwr", name, *arguments)
        self.wait(lambda: not _alive(pid), f"flwr {arguments[0]}")
        return self.log(name)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait for `done()` as long as something moves; otherwise raise an error with the logs."""
        start = moved = looked = time.monotonic()
        seen = None
        while not done():
            now = time.monotonic()
            if now >= looked:  # not every time: it reads all logs
                looked = now + 3
                if (state := self._progress()) != seen:
                    seen, moved = state, now
            if now - moved > STALL or now - start > LIMIT:
                raise TimeoutError(
                    f"waited {now - start:.0f} s for {what}, the last {now - moved:.0f} s of them "
                    f"without any progress\n{self._logs()}"
                )
            time.sleep(0.1)

    def _progress(self) -> object:
        """Return what changes when something happens: checkpoint and logs, without polling."""
        sizes = {
            file.name: len(_POLLS.sub(b"", file.read_bytes())) for file in self.folder.glob("*.log")
        }
        return self.iteration, sizes

    def _logs(self) -> str:
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}"
            for file in sorted(self.folder.glob("*.log"))
        )


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _session(leader: int) -> Iterator[int]:
    """Yield the processes of a session."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The name of the program, in parentheses, may hold spaces.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            yield int(folder.name)


def end_marked(mark: str) -> None:
    """Kill all processes that have the mark in their environment."""
    for _ in range(50):
        left = list(_marked(mark))
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def _marked(mark: str) -> Iterator[int]:
    """Yield processes with the mark in their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has ended, or is not ours
            continue
