"""PISA, SISA and NSISA on many processes: each rank or replica is a node with its own duals."""

from torchpisa.distributed.checkpoint import export, latest, load, save
from torchpisa.distributed.ddp import attach
from torchpisa.distributed.fsdp import shard

__all__ = ["attach", "export", "latest", "load", "save", "shard"]
