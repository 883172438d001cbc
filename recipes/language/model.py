"""GPT-2 as in its speed runs, in the sizes of the recipe.

Pre-norm blocks, an embedding that is the output layer too, no dropout. What is not GPT-2's: rotary
positions (Su et al., 2021), RMSNorm without weights, for queries and keys too, the square of ReLU
(So et al., 2021), no biases, so that all parameters are matrices, and projections that begin at
zero. Query, key and value are matrices of their own, since optimizers of matrices see each alone.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT2", "SIZES", "Sizes", "build"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

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
        """Return the number of rows of the embedding."""
        return math.ceil(self.vocabulary / self.multiple) * self.multiple

    @property
    def parameters(self) -> int:
        """Return the number of parameters; the embedding counts once."""
        return self.rows * self.width + self.layers * 12 * self.width**2


SIZES = {
    "tiny": Sizes(layers=2, heads=4, width=64, context=64, vocabulary=256),
    "gpt2": Sizes(layers=12, heads=12, width=768),
}


class Rotary(nn.Module):
    """A rotation of pairs of entries of queries and keys, by angles that grow with the position.

    What they give for two positions then depends on the distance of these alone.

    Args:
        context: positions.
        width: of a head.
    """

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        frequencies = 1e4 ** (-torch.arange(0, width, 2, device="cpu") / width)
        angles = torch.outer(torch.arange(context, device="cpu"), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `x`, (..., length, width)."""
        length = x.shape[-2]
        cos, sin = (t[:length].to(x.dtype) for t in (self.cos, self.sin))
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.c_q = nn.Linear(sizes.width, sizes.width, bias=False)
        self.c_k = nn.Linear(sizes.width, sizes.width, bias=False)
        self.c_v = nn.Linear(sizes.width, sizes.width, bias=False)
        self.c_proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for layer in (self.c_q, self.c_k, self.c_v)
        )
        q, k = rotary(norm(q)), rotary(norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attn = Attention(sizes)
        self.mlp = nn.ModuleDict(
            {
                "c_fc": nn.Linear(sizes.width, 4 * sizes.width, bias=False),
                "c_proj": nn.Linear(4 * sizes.width, sizes.width, bias=False),
            }
        )

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attn(norm(x), rotary)
        return x + self.mlp["c_proj"](F.relu(self.mlp["c_fc"](norm(x))).square())


class GPT2(nn.Module):
    """The model, with initial weights from torch's generator.

    Args:
        sizes: see `Sizes`.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wte = nn.Embedding(sizes.rows, sizes.width)
        self.rotary = Rotary(sizes.context, sizes.width // sizes.heads)
        self.h = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        for name, param in self.named_parameters():
            if name.endswith("c_proj.weight"):  # every block begins as the identity
                nn.init.zeros_(param)
            else:
                nn.init.normal_(param, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or with targets the mean cross-entropy in nats.

        Args:
            tokens: (sequences, length), int64; length up to the context.
            targets: the token that follows each.
        """
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, self.rotary)
        logits = F.linear(norm(x), self.wte.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(sizes: Sizes, seed: int) -> GPT2:
    """Build a model on the CPU with weights that the seed gives, the same for every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2(sizes)
