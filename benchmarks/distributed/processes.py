"""Processes that communicate over gloo, one thread each; none is left behind."""

import json
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing import start_processes

from benchmarks.pool import end_with_parent

__all__ = ["LOOPBACK", "start"]

LOOPBACK = Path("/sys/class/net/lo")  # Linux only
TIMEOUT = timedelta(minutes=2)


def start(work: Callable[..., Any], processes: int, *args: object) -> Any:
    """Run `work(*args)` on every rank of a process group and return the first rank's result.

    Args:
        work: a function of a module, since it is sent by name. What it returns becomes JSON.
        processes: number of ranks.
        *args: pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (processes, folder, work, args)
        context = start_processes(_main, arguments, processes, join=False, daemon=True)
        try:
            while not context.join():  # raises what a rank has raised
                pass
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def _main(
    rank: int, processes: int, folder: str, work: Callable[..., Any], args: tuple[object, ...]
) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    if LOOPBACK.exists():
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whose bytes are counted
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(f"{folder}/store", processes),
        rank=rank,
        world_size=processes,
        timeout=TIMEOUT,
    )
    result = work(*args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()
    # A normal exit may abort while a thread of gloo still holds a tensor.
    os._exit(0)
