"""GPT-2 as in its speed runs, in the sizes of the recipe, and transformers' plain GPT-2.

The names of the sizes are those of Hugging Face: `gpt2` (124M parameters, the paper's Nano),
`gpt2-medium` (355M) and `gpt2-xl` (1.5B); `transformers/gpt2` is the plain GPT-2 of that size.
Two are ours, with two layers and for a CPU: `tiny` reads bytes, `gpt2-tiny` GPT-2's tokens.

The model of the speed runs has pre-norm blocks, an embedding that is the output layer too, and no
dropout. What is not GPT-2's: rotary positions (Su et al., 2021), RMSNorm without weights, for
queries and keys too, the square of ReLU (So et al., 2021), no biases, so that all parameters are
matrices, and projections that begin at zero. Query, key and value are matrices of their own, since
optimizers of matrices see each alone.
"""

import importlib.util
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT2", "NAMES", "PLAIN", "SIZES", "TITLES", "PlainGPT2", "Sizes", "build"]
__all__ += ["build_by_name", "compile_in_parts", "count_parameters", "load_weights"]
__all__ += ["missing_requirement", "save_weights", "sizes_of"]


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
    "gpt2-tiny": Sizes(layers=2, heads=4, width=64, context=64),
    "gpt2": Sizes(layers=12, heads=12, width=768),
    "gpt2-medium": Sizes(layers=24, heads=16, width=1024),
    "gpt2-xl": Sizes(layers=48, heads=25, width=1600),
}
PLAIN = "transformers/"  # begins the names of plain models
NAMES = (*SIZES, *(PLAIN + size for size in SIZES))
TITLES = {"gpt2": "Nano", "gpt2-medium": "Medium", "gpt2-xl": "XL"}
"""The paper's names of the sizes."""


def sizes_of(name: str) -> Sizes:
    """Return the sizes of a model by its name, one of `NAMES`."""
    if name not in NAMES:
        raise ValueError(f"model must be one of {', '.join(NAMES)}, got {name!r}")
    return SIZES[name.removeprefix(PLAIN)]


def count_parameters(name: str) -> int:
    """Return the number of parameters of a model by its name; the embedding counts once."""
    sizes = sizes_of(name)
    if not name.startswith(PLAIN):
        return sizes.parameters
    tables = (sizes.vocabulary + sizes.context) * sizes.width
    return tables + sizes.layers * (12 * sizes.width**2 + 13 * sizes.width) + 2 * sizes.width


def missing_requirement(name: str) -> str | None:
    """Return what this machine lacks for a model, or None."""
    if name.startswith(PLAIN) and importlib.util.find_spec("transformers") is None:
        return f"{name} needs transformers: pip install transformers"
    return None


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
        recompute: compute what happens inside a block again in the backward pass instead of
            keeping it: a third more time, and memory for the blocks' inputs only.
    """

    def __init__(self, sizes: Sizes, recompute: bool = False) -> None:
        super().__init__()
        self.sizes, self.recompute = sizes, recompute
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
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, self.rotary, use_reentrant=False)
            else:
                x = block(x, self.rotary)
        if targets is None:
            return F.linear(norm(x), self.wte.weight)
        return self.output_loss(x, self.wte.weight, targets)

    @staticmethod
    def output_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(norm(x), weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class PlainGPT2(nn.Module):
    """GPT-2 of transformers, with initial weights from torch's generator and without dropout.

    Args:
        sizes: see `Sizes`; the embedding has as many rows as there are tokens.
    """

    def __init__(self, sizes: Sizes) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.sizes = sizes
        shape = {"n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
        shape |= {"n_positions": sizes.context, "vocab_size": sizes.vocabulary}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        end = dict.fromkeys(("bos_token_id", "eos_token_id"), sizes.vocabulary - 1)
        config = GPT2Config(**shape, **dropout, **end, use_cache=False)
        config._attn_implementation = "sdpa"
        self.network = GPT2LMHeadModel(config)

    @property
    def h(self) -> nn.ModuleList:
        """Return the blocks."""
        return self.network.transformer.h

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits, or with targets the mean cross-entropy in nats; see `GPT2`."""
        hidden = self.network.transformer(tokens).last_hidden_state
        weight = self.network.lm_head.weight
        if targets is None:
            return F.linear(hidden, weight)
        return self.output_loss(hidden, weight, targets)

    @staticmethod
    def output_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())


def build(sizes: Sizes, seed: int) -> GPT2:
    """Build a model on the CPU with weights that the seed gives, the same for every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2(sizes)


def build_by_name(name: str, seed: int) -> GPT2 | PlainGPT2:
    """Build a model by its name, one of `NAMES`, as `build` does."""
    sizes = sizes_of(name)
    if not name.startswith(PLAIN):
        return build(sizes, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PlainGPT2(sizes)


def compile_in_parts(model: GPT2 | PlainGPT2) -> None:
    """Let torch compile one block, which serves all of them, and the output with its loss.

    Compiling a whole model of 48 blocks takes minutes; this takes as long for any depth.
    """
    for block in model.h:
        block.compile(dynamic=False)
    # Of the instance, so that other models are as they were.
    model.output_loss = torch.compile(model.output_loss, dynamic=False)


def save_weights(model: GPT2 | PlainGPT2, folder: str | Path, name: str) -> Path:
    """Save the weights and sizes of a model and return where they are.

    A plain model becomes the folder `name` with the files of transformers' `save_pretrained`, any
    other the file `name`.pt: a dictionary with `config`, the sizes, and `model`, its state_dict.
    """
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PlainGPT2):
        model.network.save_pretrained(path)
        return path
    path = path.with_name(f"{name}.pt")
    torch.save({"config": asdict(model.sizes), "model": model.state_dict()}, path)
    return path


def load_weights(path: str | Path) -> GPT2 | PlainGPT2:
    """Return the model that `save_weights` saved, on the CPU."""
    path = Path(path)
    model: GPT2 | PlainGPT2
    if path.is_dir():
        from transformers import GPT2LMHeadModel

        network = GPT2LMHeadModel.from_pretrained(path)
        config = network.config
        sizes = Sizes(config.n_layer, config.n_head, config.n_embd, config.n_positions)
        with torch.device("meta"):
            model = PlainGPT2(Sizes(**{**asdict(sizes), "vocabulary": config.vocab_size}))
        model.network = network
        return model
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    model = build(Sizes(**saved["config"]), 0)
    model.load_state_dict(saved["model"])
    return model
