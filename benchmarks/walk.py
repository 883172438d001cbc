"""Count the files and frames that one step goes through, as a reader would follow them.

    python -m benchmarks walk            # a model of two parameters
    python -m benchmarks walk -v         # every function, in the order of the first call

Frames are counted with `sys.setprofile`, so a comprehension counts where Python makes a frame for
it (before 3.12). The measured step follows a few others, so all caches are filled.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import torchpisa
from benchmarks.distributed.processes import start
from torchpisa import MISA, NSISA, SISA, federated

__all__ = ["LIMITS", "Walk", "main", "walks"]

ROOT = Path(torchpisa.__file__).parent
# Files and frames that a step may cross at most.
LIMITS = {"SISA": (8, 100), "NSISA": (11, 180), "MISA": (11, 180)}


class Walk(NamedTuple):
    """The functions that were entered, by file and name, in order."""

    calls: list[tuple[str, str]]

    @property
    def frames(self) -> int:
        """The number of functions entered."""
        return len(self.calls)

    @property
    def files(self) -> int:
        """The number of files that define them."""
        return len({file for file, _ in self.calls})

    @property
    def jumps(self) -> int:
        """The number of changes of file from one call to the next."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return sum(one[0] != other[0] for one, other in pairs)


def follow(function: Callable[[], object]) -> Walk:
    """Return the functions of torchpisa that a call enters."""
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            calls.append((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return Walk(calls)


def step_of(make: Callable[..., Any], **settings: Any) -> Walk:
    """Return the walk of a step on a model of a matrix and a vector."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters(), **settings)
    for _ in range(9):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    return follow(optimizer.step)


def ddp_round() -> Walk:
    """Return the walk of a step that ends a round, backward pass included, on one of two ranks."""
    return Walk([(file, name) for file, name in start(_ddp_calls, 2)])


def _ddp_calls() -> list[tuple[str, str]]:
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from torchpisa.distributed import attach

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = SISA(model.parameters(), process_group=distributed.group.WORLD)
    attach(optimizer, model)

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()

    for _ in range(5):
        train()
    return follow(train).calls


def federated_round() -> Walk:
    """Return the walk of a simulated round of two clients."""
    torch.manual_seed(0)
    clients = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    algorithm = federated.SISA(sigma=1.0, rho=1.0)
    simulation = federated.Simulation(nn.Linear(4, 3), clients, algorithm)
    simulation.run(2, progress=False)
    return follow(lambda: simulation.run(3, progress=False))


def walks() -> dict[str, Walk]:
    """Return the walks of steps and rounds, by name."""
    return {
        "SISA": step_of(SISA),
        "SISA, sigma and rho given": step_of(SISA, sigma=0.5, rho=1e3),
        "SISA, loop": step_of(SISA, foreach=False),
        "NSISA": step_of(NSISA),
        "MISA": step_of(MISA),
        "SISA, DDP round": ddp_round(),
        "SISA, federated round": federated_round(),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks walk", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-v", "--verbose", action="store_true", help="name the functions")
    args = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    by_name = walks()
    print("| step | files | frames | changes of file |")
    print("|---|---|---|---|")
    for name, walk in by_name.items():
        limit = LIMITS.get(name)
        most = f" (at most {limit[0]}, {limit[1]})" if limit else ""
        print(f"| {name}{most} | {walk.files} | {walk.frames} | {walk.jumps} |")
    for name, walk in by_name.items() if args.verbose else ():
        print(f"\n{name}")
        for file, function in dict.fromkeys(walk.calls):
            print(f"    {file:40} {function}")
