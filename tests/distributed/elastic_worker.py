"""A training in which ranks kill themselves, for torchrun to start it again.

Run as a module, with a folder, a route and, as JSON, what kills each incarnation but the last.
"""

import datetime
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.problem import backward, here, network, together, weights
from torchpisa import SISA
from torchpisa.distributed import attach, latest, load, save

STEPS = 12  # of two batches each, so that every second one ends a round
EVERY = 3  # so that every second checkpoint is in the middle of a round


class Kill(NamedTuple):
    """The moment at which a rank kills itself.

    `moment` is "backward", after the backward pass of a step, or "step", after the step.
    """

    rank: int
    step: int
    moment: str


def train(folder: Path, route: str, kill: Kill | None = None) -> dict[str, Any]:
    """Train from the newest checkpoint in `folder` on; weights and losses of this rank.

    Args:
        folder: where checkpoints are.
        route: "process_group", or "attach" for DistributedDataParallel as well.
        kill: who is killed when, if anybody is.
    """
    model: Any = network(torch.float32)
    nodes = here(2)
    opt = together(SISA, nodes)(model.parameters())
    if route == "attach":
        model = DistributedDataParallel(model, bucket_cap_mb=1e-4)
        attach(opt, model)
    path = latest(folder)
    first = 0 if path is None else load(path, model, opt)["step"]
    losses = []
    for step in range(first + 1, STEPS + 1):
        opt.zero_grad()
        losses.append(backward(model, nodes[opt.batch], step, torch.float32))
        _die_in(kill, step, "backward")
        opt.step()
        _die_in(kill, step, "step")
        if step % EVERY == 0:
            save(folder / f"step-{step:06}", model, opt, {"step": step})
    return {"resumed": first, "losses": losses, "weights": weights(model)}


def _die_in(kill: Kill | None, step: int, moment: str) -> None:
    if kill == (distributed.get_rank(), step, moment):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, route, kills = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank, incarnation = distributed.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill = Kill(*kills[incarnation]) if incarnation < len(kills) else None
    if rank == 0:
        with (folder / "resumed").open("a") as file:
            print(latest(folder), file=file)
    result = train(folder, route, kill)
    torch.save(result, folder / f"result-{rank}.pt")
    # A thread of gloo that has not yet dropped its last tensor aborts a Python that is finishing.
    os._exit(0)


if __name__ == "__main__":
    main()
