"""Starts Flower's processes by forking one that has imported torch and Flower already.

The stock commands start a new Python for every message to a client, which imports torch each time:
too slow for many rounds on two cores. What is forked here is Flower's own code with Flower's own
command lines, but for four things: polling and heartbeats are faster, an app runs in a fork of
its SuperExec instead of in a new interpreter, a SuperNode that has ended is started again, on
another port, as a service manager would, and one that was busy for a run when that was stopped does
not stay an answer behind, with each waiting for the next question.

Orders come as JSON lines on standard input, `{"role", "arguments", "environment", "log"}`; the
answer to each is the id of the process, which leads a process group of its own.
"""

import ctypes
import importlib
import json
import os
import queue
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.federated.flower.ports import free_port

_NAPS = {3: 0.2, 0.5: 0.1}
"""Seconds that a SuperNode waits instead: for a message, and for the answer of its app."""

_PR_SET_PDEATHSIG = 1
"""Of Linux's `prctl`: the signal to get when the parent has ended."""

_MODULES = [
    "flwr.cli.app",
    "flwr.supercore.heartbeat",
    "flwr.supercore.superexec.run_superexec",
    "flwr.superlink.cli.flower_superlink",
    "flwr.superlink.main",
    "flwr.superlink.runtime.run_serverapp",
    "flwr.superlink.servicer.fleet.fleet_handlers",
    "flwr.supernode.cli.flower_supernode",
    "flwr.supernode.fleet_http_connection",
    "flwr.supernode.main",
    "flwr.supernode.runtime.run_clientapp",
    "flwr.supernode.start_client_internal",
    "sklearn.datasets",
    "torch",
    "torchpisa.federated.flower",
    "torchpisa.federated.flower.gate",
]


def main() -> None:
    """Take orders until standard input ends."""
    warnings.simplefilter("ignore")
    _preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that the dead are not kept as zombies
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(order)
        print(pid, flush=True)


def _become(order: dict) -> None:
    _end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.environ.update(order["environment"])
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.argv = [order["role"], *order["arguments"]]
    try:
        _ROLES[order["role"]]()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """Let this process be killed when its parent ends, so that killed tests leave nothing behind.

    Only where the parent's main thread has forked it: the signal comes at the thread's end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _preload() -> None:
    for name in _MODULES:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.set_num_threads(1)
    node = sys.modules["flwr.supernode.start_client_internal"]
    node.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(_NAPS[seconds]))
    node._push_messages = _until_answered(node._push_messages)
    # A SuperNode that was killed is let in again when the SuperLink has missed it, which takes two
    # such intervals; in Flower, a minute.
    sys.modules["flwr.supernode.fleet_http_connection"].HEARTBEAT_DEFAULT_INTERVAL = 3
    sys.modules["flwr.superlink.servicer.fleet.fleet_handlers"].HEARTBEAT_MIN_INTERVAL = 1
    # They are sent every 0.8 (interval - 5) seconds.
    sys.modules["flwr.supercore.heartbeat"].HEARTBEAT_DEFAULT_INTERVAL = 7


def _until_answered(push: Callable[..., None]) -> Callable[..., None]:
    """Return a function that pushes answers until that to the newest message is among them."""

    def pushed(*, state, **more) -> None:
        held = list(state.msg_store.items())
        asked = [key for key, entry in held if not entry.message.metadata.reply_to_message_id]
        push(state=state, **more)
        while asked and asked[-1] in state.msg_store:
            push(state=state, **more)

    return pushed


def _superlink() -> None:
    from flwr.superlink.cli.flower_superlink import flower_superlink

    root = _argument("--ssl-ca-certfile")
    _fork(lambda: _superexec(_argument("--port"), root))
    flower_superlink()


def _supernode() -> None:
    from flwr.supernode.cli.flower_supernode import flower_supernode

    while True:
        # Another port at every start: the last one may be what it died of.
        sys.argv[sys.argv.index("--port") + 1] = str(free_port())
        executor = _fork(lambda: _superexec(_argument("--port"), None))
        os.waitpid(_fork(flower_supernode), 0)
        os.kill(executor, signal.SIGKILL)
        os.waitpid(executor, 0)
        time.sleep(0.5)


def _gate() -> None:
    from torchpisa.federated.flower.commands import main

    main(["gate", *sys.argv[1:]])


def _cli() -> None:
    from flwr.cli.app import app

    app(args=sys.argv[1:])


_ROLES: dict[str, Callable[[], None]] = {
    "flower-superlink": _superlink,
    "flower-supernode": _supernode,
    "flwr": _cli,
    "gate": _gate,
}


def _superexec(port: str, root: str | None) -> None:
    from flwr.supercore.superexec.executor import SubprocessExecutor
    from flwr.supercore.superexec.run_superexec import run_superexec

    SubprocessExecutor.launch = _launch
    sys.argv = ["flower-superexec"]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    run_superexec(
        runtime_api_address=f"127.0.0.1:{port}",
        insecure=root is None,
        root_certificates_path=root,
        parent_pid=os.getppid(),
    )


def _launch(self, spec):
    from flwr.supercore.superexec.executor import LaunchResult

    _fork(lambda: _app(spec), by_main_thread=False)
    return LaunchResult.accepted()


def _app(spec) -> None:
    from flwr.superlink.runtime.run_serverapp import run_serverapp
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    root = spec.root_certificates_path
    common = {
        "runtime_api_address": spec.runtime_api_address,
        "token": spec.token,
        "insecure": spec.insecure,
        "certificates": Path(root).read_bytes() if root else None,
        "parent_pid": spec.parent_pid,
    }
    if spec.task_type == "flwr-clientapp":
        run_clientapp(**common)
    else:
        run_serverapp(log_queue=queue.Queue(), **common)


def _fork(work: Callable[[], None], by_main_thread: bool = True) -> int:
    pid = os.fork()
    if pid:
        return pid
    if by_main_thread:
        _end_with_parent()
    try:
        work()
    except SystemExit:
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _argument(name: str) -> str | None:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


if __name__ == "__main__":
    main()
