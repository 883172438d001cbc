"""Shared by `ddp.py` and `hsdp.py`: a text in uneven parts, a transformer on bytes, the loop."""

import argparse
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchpisa.data import RoundSampler, split
from torchpisa.distributed import latest, load, save

CONTEXT = 64
BATCH_SIZE = 16  # of each process
VALIDATION = 128  # windows of each node
LINES = 10  # of progress


# Processes


def launch(work: Callable[[torch.device], None]) -> None:
    """Run `work` in all processes of torchrun, or in this one; on GPUs if there are enough."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend, of_process = ("gloo", None) if device.type == "cpu" else ("nccl", device)
    where = {}
    if "RANK" not in os.environ:
        where = {"store": distributed.HashStore(), "rank": 0, "world_size": 1}
    distributed.init_process_group(backend, device_id=of_process, **where)
    work(device)
    # Not after an error: the others may be waiting then, and torchrun ends them.
    distributed.destroy_process_group()
    leave(0)


def leave(status: int) -> NoReturn:
    """End this process at once.

    A normal exit may abort while a thread of gloo still holds a tensor.
    """
    sys.stdout.flush()
    os._exit(status)


def check(problem: str | None) -> None:
    """End all processes, with one message, if one of them has a problem."""
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    messages = [message for message in problems if message is not None]
    if messages:
        if distributed.get_rank() == 0:
            print(f"{Path(sys.argv[0]).name}: error: {messages[0]}", file=sys.stderr, flush=True)
        distributed.barrier()  # whoever ends first ends the others, so not before the message
        leave(2)


# Options


class Parser(argparse.ArgumentParser):
    """A parser for all processes, of which only the first prints errors."""

    def error(self, message: str) -> NoReturn:
        check(message)
        raise AssertionError


def parser(description: str, optimizers: Sequence[str]) -> Parser:
    result = Parser(description=description.partition("\n")[0])
    add = result.add_argument
    add("--optimizer", choices=optimizers, default=optimizers[0], help="default: %(default)s")
    add("--sigma", type=float, default=0.07, help="of SISA's rule; default: %(default)s")
    add("--rho", type=float, default=500.0, help="of SISA's rule; default: %(default)s")
    add("--steps", type=whole_number(1), default=500, help="default: %(default)s")
    add("--seed", type=whole_number(0), default=0, help="default: %(default)s")
    add("--text", type=Path, help="a file; default: Python's standard library")
    dtypes = "bfloat16", "float16", "float32"
    add("--reduce-dtype", choices=dtypes, default="float32", help="default: %(default)s")
    add("--checkpoint", type=Path, help="a folder to save in and to resume from; default: none")
    add("--every", type=whole_number(1), default=100, help="steps between saves; default: 100")
    return result


def whole_number(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {low}, got {text!r}")
        return int(text)

    return parse


# The text


def read(path: Path | None) -> bytes:
    """Return the bytes of a file, or of the standard library, module by module in name order."""
    if path is not None:
        return path.read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    modules = {module.relative_to(folder): module for module in sorted(folder.rglob("*.py"))}
    return b"".join(
        module.read_bytes()
        for name, module in modules.items()
        if name.parts[0].removesuffix(".py") in sys.stdlib_module_names
    )


class Part:
    """The part of the text that one node has; parts differ in content and in size.

    The text is cut into one piece per node, of sizes 1 : 2 : 3 and so on. Every tenth window of a
    piece is for validation.

    Args:
        options: the options, of which `text` and `seed` are used.
        device: the device of the windows.
        node: the index of the piece, from 0.
        nodes: the number of pieces.
        member: the index of this process among those that share the node, from 0.
        members: their number. Each takes an equal share of the node's windows.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        node: int,
        nodes: int,
        member: int = 0,
        members: int = 1,
    ) -> None:
        self._device, self._member, self._members = device, member, members
        text, problem = b"", None
        batch_size = BATCH_SIZE * members
        least = nodes * (nodes + 1) * batch_size * CONTEXT  # two batches in the smallest piece
        try:
            text = read(options.text)
            if len(text) <= least:
                problem = f"--text must have more than {least} bytes, got {len(text)}"
        except OSError as error:
            problem = f"--text cannot be read: {error}"
        check(problem)
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        windows = windows.unfold(0, CONTEXT + 1, CONTEXT)
        sizes = [2 * (i + 1) / (nodes * (nodes + 1)) for i in range(nodes)]
        pieces = split(windows, nodes, sizes=sizes, shuffle=False)
        own = windows[pieces.indices[node]]
        held_out = torch.arange(len(own)) % 10 == 0
        self.weight = pieces.weights[node]
        self._training, rest = own[~held_out], own[held_out]
        self.validation = self._mine(rest[:: max(1, len(rest) // VALIDATION)][:VALIDATION])
        self._order = RoundSampler(split(self._training, 1), batch_size, seed=options.seed)

    def draw(self, step: int) -> Tensor:
        """Return the batch of a step, a function of `step`, so that a run can be resumed."""
        return self._mine(self._training[self._order.draw(step, 0)])

    def _mine(self, windows: Tensor) -> Tensor:
        """Return the windows of this process; every member of a node gets as many."""
        each = len(windows) // self._members
        return windows[self._member * each :][:each].to(self._device).long()

    def average(self, *losses: Tensor) -> list[float]:
        """Return losses, averaged over nodes by weight and over their members."""
        total = torch.stack(losses) * (self.weight / self._members)
        distributed.all_reduce(total)
        return total.tolist()


# The model


class Transformer(nn.Module):
    """Causal layers over bytes."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Attention, and two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


# The loop


def train(
    model: nn.Module,
    optimizer: Optimizer,
    part: Part,
    options: argparse.Namespace,
    scale: float = 1.0,
) -> None:
    """Train, print, save, and resume where a run with the same options was stopped.

    Args:
        model: as it is called, so in DistributedDataParallel if that is used.
        optimizer: the optimizer of its parameters.
        part: the data of this process.
        options: see `parser`.
        scale: a factor on the gradients.
    """
    steps, first = options.steps, 0
    # Two thirds of the run at the full learning rate, then down to zero.
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, 3 * (1 - step / steps)))
    path = latest(options.checkpoint) if options.checkpoint else None
    if path is not None:
        extra = load(path, model, optimizer)
        first = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
        say(f"resumed from {path}" + (", nothing left to do" if first >= steps else ""))
    start = time.perf_counter()
    losses = []
    for step in range(first + 1, steps + 1):
        loss = loss_of(model, part.draw(step))
        (scale * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.detach())
        if step % max(1, steps // LINES) == 0 or step == steps:
            with torch.no_grad():
                validation = loss_of(model, part.validation)
            trained, validated = part.average(torch.stack(losses).mean(), validation)
            losses.clear()
            say(f"step {step:5}  training loss {trained:.4f}  validation loss {validated:.4f}")
        if options.checkpoint and (step % options.every == 0 or step == steps):
            extra = {"step": step, "scheduler": scheduler.state_dict()}
            save(options.checkpoint / f"step-{step:06}", model, optimizer, extra)
    if first < steps:
        seconds = time.perf_counter() - start
        bits = validated / math.log(2)
        say(f"{options.optimizer}: {bits:.3f} bits per byte of validation text, {seconds:.0f} s")


def say(line: str) -> None:
    if distributed.get_rank() == 0:
        print(line, flush=True)
