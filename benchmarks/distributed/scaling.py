"""A model of many nodes: the time of a step if all-reduces are rings over links of some speed.

One rank per node. The gradients of a backward pass become ready one after the other, spread over
its time by their sizes, and cross the network in DDP's buckets, one all-reduce at a time. What is
not done when the backward pass ends is waited for.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.shapes import MODELS, parameters

__all__ = ["ACCELERATOR", "NETWORKS", "NODES", "Network", "all_reduce_s", "compute_s", "step_s"]

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of gradients, DDP's defaults
NODES = (8, 32, 128, 512, 1024)


class Network(NamedTuple):
    """The links between nodes.

    Attributes:
        latency_s: from one node to the next, alpha.
        s_per_byte: beta.
        tree: whether latencies grow with the logarithm of the number of nodes.
    """

    latency_s: float
    s_per_byte: float
    tree: bool = False


class Accelerator(NamedTuple):
    """The accelerator of a node, and the work it does."""

    flop_per_s: float
    tokens: int


# Assumed, not measured.
NETWORKS = {
    "100 Gbit/s, 5 µs": Network(5e-6, 8 / 100e9),
    "10 Gbit/s, 30 µs": Network(30e-6, 8 / 10e9),
}
ACCELERATOR = Accelerator(flop_per_s=200e12, tokens=16 * 1024)


def all_reduce_s(nodes: int, size: float, network: Network) -> float:
    """Return the seconds to sum `size` bytes over a ring, with 2 (n - 1) messages of size / n."""
    hops = 2 * math.log2(nodes) if network.tree else 2 * (nodes - 1)
    return hops * network.latency_s + 2 * (nodes - 1) / nodes * size * network.s_per_byte


def buckets(model: str) -> list[int]:
    """Return the parameters in each bucket, in the order in which they become ready."""
    full, count = [], 0
    for shape in reversed(MODELS[model]()):
        count += math.prod(shape.size)
        if 4 * count >= (BUCKET if full else FIRST_BUCKET):
            full.append(count)
            count = 0
    return [*full, count] if count else full


def compute_s(model: str, accelerator: Accelerator = ACCELERATOR) -> tuple[float, float]:
    """Return the seconds of forward and backward: 2 and 4 operations per parameter and token."""
    once = 2 * parameters(MODELS[model]()) * accelerator.tokens / accelerator.flop_per_s
    return once, 2 * once


def exposed_s(sizes: Sequence[float], backward_s: float, nodes: int, network: Network) -> float:
    """Return the seconds from the end of the backward pass until the last bucket has arrived."""
    ready = done = 0.0
    for size in sizes:
        ready += backward_s * size / sum(sizes)
        done = max(ready, done) + all_reduce_s(nodes, size, network)
    return done - backward_s


def step_s(
    model: str,
    nodes: int,
    network: Network,
    *,
    item_bytes: int = 4,
    line: bool = True,
    batches: int = 1,
    accelerator: Accelerator = ACCELERATOR,
) -> float:
    """Return the seconds per backward pass.

    Args:
        model: one of `shapes.MODELS`.
        nodes: number of ranks.
        network: the links.
        item_bytes: the bytes of a number on the wire.
        line: whether a line of numbers follows the buckets, one per parameter tensor and three
            more, as with `attach`.
        batches: backward passes of a rank per all-reduce; only the last one can hide it.
        accelerator: the accelerator of each node.
    """
    forward, backward = compute_s(model, accelerator)
    sizes = [item_bytes * count for count in buckets(model)]
    exposed = exposed_s(sizes, backward, nodes, network)
    if line:
        exposed += all_reduce_s(nodes, 8 * (len(MODELS[model]()) + 3), network)
    return forward + backward + exposed / batches
