"""Checkpoints of all ranks together, which load on the same number of ranks or on another.

`folder` saves and loads. `contents` describes an optimizer in plain values, `storage` reads folders
and files, `matching` checks that a checkpoint fits, and `remap` maps its nodes to those of another
number of ranks.
"""

from torchpisa.distributed.checkpoint.folder import export, latest, load, save

__all__ = ["export", "latest", "load", "save"]
