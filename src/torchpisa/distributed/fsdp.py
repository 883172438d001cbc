"""FSDP2 and HSDP: shard each replica, which is then one node with its own duals."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["shard"]


def shard(
    model: nn.Module, mesh: "DeviceMesh", layers: Iterable[nn.Module] = (), **options: Any
) -> "DeviceMesh":
    """Shard `model` within each replica, so that gradients stay local to a replica.

    torch's `fully_shard` on both dimensions of `mesh` would average gradients over replicas. This
    calls it with the dimension of shards only; the optimizer connects the replicas.

    Args:
        model: the model; its parameters become DTensors, so make the optimizer afterwards.
        mesh: replicas by shards, with names, as from `init_device_mesh(device, (replicas, shards),
            mesh_dim_names=("replicate", "shard"))`.
        layers: parts of the model that are gathered one at a time, such as the blocks of a
            transformer, inner ones first.
        **options: passed on to `fully_shard`.

    Returns:
        The mesh of replicas, for the optimizer's `process_group`.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2 or not mesh.mesh_dim_names:
        raise ValueError(
            "mesh must be a DeviceMesh of two named dimensions, replicas and shards, got "
            f"{mesh!r}; to shard a single replica, use torch's fully_shard and leave the "
            "optimizer's process_group out"
        )
    replicas, shards = (mesh[name] for name in mesh.mesh_dim_names)
    for layer in layers:
        fully_shard(layer, mesh=shards, **options)
    fully_shard(model, mesh=shards, **options)
    return replicas
