"""Train a small transformer on text with HSDP: every replica is a node, its processes hold shards.

    torchrun --nproc-per-node 4 examples/hsdp.py

The text, the model and the settings are those of `ddp.py`. Four processes are two replicas of two
shards, unless --replicas says otherwise; the processes of a replica take different windows of its
part of the text. Bits per byte on the validation text, with Python 3.11 and torch 2.13 on a CPU:
2.144 and 2.243 for SISA with seeds 0 and 1, 2.023 for NSISA with seed 0.
"""

import text
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from torchpisa import NSISA, SISA
from torchpisa.distributed import shard
from torchpisa.optim.param_groups import split


def main(device: torch.device) -> None:
    world = distributed.get_world_size()
    parser = text.parser(__doc__, ("sisa", "nsisa"))
    parser.add_argument(
        "--replicas",
        type=text.whole_number(1),
        default=world if world % 2 else 2,
        help="default: 2, or one per process if their number is odd",
    )
    options = parser.parse_args()
    replicas = options.replicas
    if world % replicas:
        parser.error(f"--replicas must divide the number of processes {world}, got {replicas}")

    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=names)
    node, member = mesh.get_coordinate()
    part = text.Part(options, device, node, replicas, member, world // replicas)
    torch.manual_seed(options.seed)
    model = text.Transformer().to(device)
    nodes = shard(model, mesh, model.blocks)
    together = {
        "process_group": nodes,
        "weights": [part.weight],
        "reduce_dtype": getattr(torch, options.reduce_dtype),
    }
    if options.optimizer == "sisa":
        opt = SISA(model.parameters(), sigma=options.sigma, rho=options.rho, **together)
    else:
        rest = {"sisa_sigma": options.sigma, "sisa_rho": options.rho}
        opt = NSISA(split(model), sigma=15.0, **rest, **together)
    text.train(model, opt, part, options)


if __name__ == "__main__":
    text.launch(main)
