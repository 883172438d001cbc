"""Train a small transformer on text with DistributedDataParallel: every rank is a node.

    torchrun --nproc-per-node 4 examples/ddp.py

Nothing is downloaded: the text is Python's standard library, of which each rank has other modules
than the others, and more or fewer of them. It takes a minute or two on two cores, runs on GPUs if
there is one for each process, and without torchrun in one process.

Settings were searched on the validation text, with four nodes and 500 steps: for SISA sigma from
0.02 to 4 and rho from 30 to 4000, for NSISA sigma from 5 to 80, for AdamW nine learning rates from
3e-4 to 8e-3. Sigma 2 and rho 100, good for parts that share no label, are far too cautious for
these. Bits per byte on the validation text with
four processes, seeds 0, 1 and 2, Python 3.11 and torch 2.13 on a CPU:

    SISA, sigma 0.07, rho 500      2.130  2.161  2.124
    AdamW, learning rate 6e-3      2.112  2.147  2.125
    NSISA, sigma 15                1.939  1.970  1.957
    SISA, --reduce-dtype bfloat16  2.133
    SISA, --sigma 2 --rho 100      3.439
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
