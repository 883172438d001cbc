"""torchrun in tests: it ends in time, and none of its processes is left behind."""

import contextlib
import gc
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed import TCPStore

from tests.distributed.processes import CONTEXT

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


def forked(
    script: Path, *arguments: object, ranks: int | None = None, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a script as `torchrun` does, in forks of a process that has imported torch.

    Args:
        script: its path.
        *arguments: its arguments.
        ranks: number of processes; None is one that torchrun has not started.
        timeout: seconds after which everything is killed and TimeoutExpired raised.
    """
    words = [str(script), *map(str, arguments)]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.nullcontext([{}]) if ranks is None else environments(ranks) as of_ranks,
    ):
        stems = [f"{folder}/{rank}" for rank in range(len(of_ranks))]
        processes = [
            CONTEXT.Process(target=_become, args=(words, *one), daemon=True)
            for one in zip(of_ranks, stems, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + timeout
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
                if process.exitcode is None:
                    raise subprocess.TimeoutExpired(words, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        stdout, stderr = (
            "".join(Path(f"{stem}.{stream}").read_text(encoding="utf-8") for stem in stems)
            for stream in ("out", "err")
        )
    code = max((process.exitcode for process in processes), key=abs)
    return subprocess.CompletedProcess(words, code, stdout, stderr)


@contextlib.contextmanager
def environments(ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield what torchrun tells each of its processes, and serve the store where they meet."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_all = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
        **{"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    }
    yield [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _become(words: Sequence[str], environment: Mapping[str, str], stem: str) -> None:
    gc.freeze()  # see processes.py
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{stem}.{name}", os.O_CREAT | os.O_WRONLY), stream)
    os.chdir(ROOT)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


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
