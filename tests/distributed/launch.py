"""torchrun in tests: it ends in time, and none of its processes is left behind."""

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]

_MARK = "TORCHPISA_TEST_RUN"
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Otherwise processes that were started again may look for those before them, at addresses that
    # torchrun still has in its store (pytorch/pytorch#135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun(
    *command: object, ranks: int, restarts: int = 0, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a script, or `-m` and a module, with its arguments, in so many processes.

    Args:
        *command: script and arguments.
        ranks: number of processes.
        restarts: how often all of them are started again when one has failed.
        timeout: seconds after which everything is killed and TimeoutExpired raised.
    """
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1"),
    ]
    return run(*launcher, *command, timeout=timeout)


def run(*command: object, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
    """Run a command in the root of the repository; see `torchrun`."""
    mark = uuid.uuid4().hex
    arguments = [str(part) for part in command]
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env={**os.environ, **_ENVIRONMENT, _MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
        left = _marked(mark)
        assert not left, f"{arguments} left processes behind: {left}"
    finally:
        process.kill()
        # torchrun gives each of its processes a session of its own, so they are looked for.
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


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
