"""Real processes for tests: they talk over gloo, end in time, and none is left behind."""

import datetime
import gc
import multiprocessing
import os
import pickle
import re
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

TIMEOUT = 120.0
# What torch 2.6, the oldest that is supported, says to FSDP2 without an accelerator.
NO_FSDP = re.compile(
    "'Stream' object has no attribute|unexpected keyword argument 'ignored_params'"
)

# Processes are forked from a server that has imported once what all of them need, and done nothing
# with it: without pytest and the test's own modules, three quarters of a start are imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torchpisa.distributed",
        "pytest",
        "tests.distributed.problem",
    ]
)


class RankError(RuntimeError):
    """A process ended without a result."""


def run(
    work: Callable[..., Any], ranks: int, *args: Any, killed: int | None = None, **kwargs: Any
) -> list[Any]:
    """`work(*args, **kwargs)` on so many ranks of a process group; what each of them returns.

    Args:
        work: a function of a module, since it is sent by name.
        ranks: number of processes.
        killed: a rank that is expected to be killed; its result is None.
        *args: pickled, as the results are.
        **kwargs: likewise.
    """
    with tempfile.TemporaryDirectory() as folder:
        pairs = [CONTEXT.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            CONTEXT.Process(
                target=_main,
                args=(
                    *(pairs[rank][1], Path(folder) / "store", rank, ranks, killed is not None),
                    *(work, args, kwargs),
                ),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            for _, sender in pairs:
                sender.close()
            return _results([receiver for receiver, _ in pairs], killed)
        finally:
            for process in processes:
                process.kill()
                process.join()


def run_cases(work: Callable[[str], str], ranks: int, cases: list[str]) -> list[dict[str, str]]:
    """Return the result of `work` for each case, on each of `ranks` processes that start once."""
    return run(_in_turn, ranks, work, cases)


def _in_turn(work: Callable[[str], str], cases: list[str]) -> dict[str, str]:
    answers = {}
    for case in cases:
        answers[case] = work(case)
        distributed.barrier()
    return answers


def _results(receivers: list[Connection], killed: int | None) -> list[Any]:
    results: list[Any] = [None] * len(receivers)
    waiting = dict(enumerate(receivers))
    deadline = time.monotonic() + TIMEOUT
    failures = []
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.append(f"ranks {sorted(waiting)} did not end within {TIMEOUT:.0f} s")
            break
        for rank, receiver in list(waiting.items()):
            if receiver not in ready:
                continue
            del waiting[rank]
            try:
                done, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                if rank != killed:
                    failures.append(f"rank {rank} ended without a result")
                continue
            if done:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
                deadline = min(deadline, time.monotonic() + 5)  # for the others' side of it
    if torch.__version__ < "2.7" and any(map(NO_FSDP.search, failures)):
        pytest.skip("torch 2.6 has no FSDP2 on CPUs")
    if failures:
        raise RankError("\n".join(failures))
    return results


def _main(
    sender: Connection,
    store: Path,
    rank: int,
    ranks: int,
    expects_death: bool,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    gc.freeze()  # the optimizer looks through all objects for models, and none is imported
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(str(store), ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=30),
        )
        value = work(*args, **kwargs)
        if not expects_death:
            # A rank that is through must not leave while others are still connecting to it.
            distributed.barrier()
        answer = True, value
    except BaseException:
        answer = False, traceback.format_exc()
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    # Threads of gloo and of autograd may be waiting; no destructor is to wait for them.
    os._exit(0)
