"""What `ddp.py` and `hsdp.py` share: a text in uneven parts, a transformer on bytes, the loop."""

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
VALIDATION = 128  # windows that each node looks at
LINES = 10  # of progress


# Processes


def launch(work: Callable[[torch.device], None]) -> None:
    """Do `work` in all processes that torchrun started, or here; on GPUs if each can have one."""
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
    """End this process.

    At once, because a thread of gloo that has not yet dropped its last tensor aborts a Python that
    is finishing.
    """
    sys.stdout.flush()
    os._exit(status)


def check(problem: str | None) -> None:
    """End all processes, with one message, if one of them has a problem."""
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    found = [own for own in problems if own is not None]
    if found:
        if distributed.get_rank() == 0:
            print(f"{Path(sys.argv[0]).name}: error: {found[0]}", file=sys.stderr, flush=True)
        distributed.barrier()  # whoever ends first ends the others, so not before the message
        leave(2)


# Options


class Parser(argparse.ArgumentParser):
    """One that all processes use, and of which one complains."""

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
    """A file, or the standard library, module after module in the order of their names."""
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
    """What a node has of the text: other modules than the others, and more or fewer of them.

    The text is cut into one piece per node, of sizes 1 : 2 : 3 and so on. Every tenth window of a
    piece is for validation.

    Args:
        options: `text` and `seed` of these.
        device: where windows go.
        node: which piece, from 0.
        nodes: number of pieces.
        member: which of the processes that share the node, from 0.
        members: number of these. Each takes its share of the node's windows.
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
        """What to train on: a function of the step, so that a resumed run goes on as it was."""
        return self._mine(self._training[self._order.draw(step, 0)])

    def _mine(self, windows: Tensor) -> Tensor:
        """This process's share; every member gets as many."""
        each = len(windows) // self._members
        return windows[self._member * each :][:each].to(self._device).long()

    def average(self, *losses: Tensor) -> list[float]:
        """Of all nodes, by weight, and of their members."""
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
        optimizer: of its parameters.
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
