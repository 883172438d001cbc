"""Checkpoints of all ranks together, to be loaded on as many ranks or on others.

`folder` saves and loads; `contents` is what a checkpoint says besides its tensors, `stored` how it
lies on a disk, `fit` whether it fits an optimizer, `remap` how its nodes become those of another
number of ranks.
"""

from torchpisa.distributed.checkpoint.folder import export, latest, load, save

__all__ = ["export", "latest", "load", "save"]
