"""Train a small transformer on text with DistributedDataParallel: every rank is a node.

torchrun --nproc-per-node 4 examples/ddp.py
"""

import text
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from torchpisa import NSISA, SISA
from torchpisa.distributed import attach
from torchpisa.optim.param_groups import split


def main(device: torch.device) -> None:
    parser = text.parser(__doc__, ("sisa", "nsisa", "adamw"))
    parser.add_argument("--lr", type=float, default=6e-3, help="of AdamW; default: %(default)s")
    options = parser.parse_args()
    averages = options.optimizer == "adamw"
    if averages and (options.checkpoint or options.reduce_dtype != "float32"):
        parser.error("--checkpoint and --reduce-dtype are for sisa and nsisa, got adamw")

    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    part = text.Part(options, device, rank, ranks)
    torch.manual_seed(options.seed)
    model = text.Transformer().to(device)
    ddp = DistributedDataParallel(model)
    if averages:
        opt = torch.optim.AdamW(model.parameters(), lr=options.lr)
        # The average over ranks becomes one over the text, which is what SISA minimises.
        text.train(ddp, opt, part, options, scale=ranks * part.weight)
        return

    together = {
        "process_group": distributed.group.WORLD,
        "weights": [part.weight],
        "reduce_dtype": getattr(torch, options.reduce_dtype),
    }
    if options.optimizer == "sisa":
        opt = SISA(model.parameters(), sigma=options.sigma, rho=options.rho, **together)
    else:
        rest = {"sisa_sigma": options.sigma, "sisa_rho": options.rho}
        opt = NSISA(split(model), sigma=15.0, **rest, **together)
    attach(opt, ddp)
    text.train(ddp, opt, part, options)


if __name__ == "__main__":
    text.launch(main)
