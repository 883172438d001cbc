"""GPT-2, in the sizes of the recipe.

Pre-norm blocks with GELU, biases, learned positions, an embedding that is the output layer too, no
dropout. Parameters have the names that transformers gives them and lie as `nn.Linear` has them,
(out, in); query, key and value are one matrix, for every optimizer.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT2", "SIZES", "Sizes", "build"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Attributes:
        layers: blocks.
        heads: of attention, per block.
        width: of the residual stream.
        context: the longest sequence.
        vocabulary: tokens that occur.
        multiple: the embedding gets rows that no token uses, until their number is a multiple of
            this: the products with it are then faster on a GPU.
    """

    layers: int
    heads: int
    width: int
    context: int = 1024
    vocabulary: int = 50257
    multiple: int = 64

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return math.ceil(self.vocabulary / self.multiple) * self.multiple

    @property
    def parameters(self) -> int:
        """Number of parameters; the embedding counts once."""
        block = 12 * self.width**2 + 13 * self.width
        return (self.rows + self.context + 2) * self.width + self.layers * block


SIZES = {
    "tiny": Sizes(layers=2, heads=4, width=64, context=64, vocabulary=256),
    "gpt2": Sizes(layers=12, heads=12, width=768),
}


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.c_attn = nn.Linear(sizes.width, 3 * sizes.width)
        self.c_proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes)
        self.ln_2 = nn.LayerNorm(sizes.width)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(sizes.width, 4 * sizes.width),
                "c_proj": nn.Linear(4 * sizes.width, sizes.width),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        hidden = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class GPT2(nn.Module):
    """The model; initialised as GPT-2 is, from torch's generator.

    Args:
        sizes: see `Sizes`.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wte = nn.Embedding(sizes.rows, sizes.width)
        self.wpe = nn.Embedding(sizes.context, sizes.width)
        self.h = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.ln_f = nn.LayerNorm(sizes.width)
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):
                # 2 per block are added up in the residual stream, which keeps its size this way.
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * sizes.layers))
            elif param.dim() > 1:
                nn.init.normal_(param, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """The logits, or with targets the mean cross-entropy in nats.

        Args:
            tokens: (sequences, length), int64; length up to the context.
            targets: the token that follows each.
        """
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(sizes: Sizes, seed: int) -> GPT2:
    """A model on the CPU, its first weights by the seed: the same for every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2(sizes)
