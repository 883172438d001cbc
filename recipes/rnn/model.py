"""AWD-LSTM: tied embedding, dropout of recurrent weights, locked dropout."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["LanguageModel", "Sizes"]


class Sizes(NamedTuple):
    """The sizes of a model: of the embedding, which the last layer has too, and of other layers."""

    embedding: int = 400
    hidden: int = 1150


# Of the AdaBelief experiments.
WORD_DROP, INPUT_DROP, HIDDEN_DROP, OUTPUT_DROP, WEIGHT_DROP = 0.1, 0.4, 0.25, 0.4, 0.5
ACTIVATION, SLOWNESS = 2.0, 1.0  # AR and TAR


class Layer(nn.Module):
    """An LSTM layer with new dropout of its recurrent weights in every pass."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        lstm = nn.LSTM(inputs, outputs)  # for its initialisation
        for name, param in lstm.named_parameters():
            self.register_parameter(name, nn.Parameter(param.detach().clone()))
        self.outputs = outputs

    def forward(self, x: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        recurrent = F.dropout(self.weight_hh_l0, WEIGHT_DROP, self.training)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        output, h, c = torch.lstm(
            *(x, hidden, weights),
            **{"has_biases": True, "num_layers": 1, "dropout": 0.0, "train": self.training},
            **{"bidirectional": False, "batch_first": False},
        )
        return output, h, c


class LanguageModel(nn.Module):
    """A language model of LSTM layers.

    Args:
        words: different ones.
        layers: of LSTMs.
        sizes: see `Sizes`.
    """

    def __init__(self, words: int, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, sizes.embedding)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        widths = [sizes.embedding, *[sizes.hidden] * (layers - 1), sizes.embedding]
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(Layer(inputs, outputs) for inputs, outputs in pairs)
        self.bias = nn.Parameter(torch.zeros(words))

    def start(self, count: int) -> list[Tensor]:
        """Return hidden states, all zero: h and c of every layer."""
        device = self.bias.device
        return [
            torch.zeros(1, count, layer.outputs, device=device)
            for layer in self.layers
            for _ in range(2)
        ]

    def forward(
        self, words: Tensor, targets: Tensor, hidden: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the mean loss, and the loss with AR and TAR; move the hidden states on in place.

        Args:
            words: (time, count).
            targets: the words that follow, of the same shape.
            hidden: of `start`; no gradient goes through them.
        """
        x = locked_dropout(self.embed(words), INPUT_DROP, self.training)
        raw = x
        for number, layer in enumerate(self.layers):
            before = hidden[2 * number], hidden[2 * number + 1]
            raw, *after = layer(x, (before[0].clone(), before[1].clone()))
            for old, new in zip(before, after, strict=True):
                old.copy_(new.detach())
            last = number == len(self.layers) - 1
            x = locked_dropout(raw, OUTPUT_DROP if last else HIDDEN_DROP, self.training)
        logits = F.linear(x, self.embedding.weight, self.bias)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        slowness = (raw[1:] - raw[:-1]).pow(2).mean() if len(raw) > 1 else raw.new_zeros(())
        return loss, loss + ACTIVATION * x.pow(2).mean() + SLOWNESS * slowness

    def embed(self, words: Tensor) -> Tensor:
        """Return embeddings; in training some words are dropped wherever they occur."""
        weight = self.embedding.weight
        if self.training:
            mask = torch.full((len(weight), 1), 1 - WORD_DROP, device=weight.device).bernoulli()
            weight = weight * mask / (1 - WORD_DROP)
        return F.embedding(words, weight)


def locked_dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Apply dropout with one mask for all times."""
    if not training:
        return x
    mask = torch.full_like(x[:1], 1 - rate, requires_grad=False).bernoulli()
    return x * mask / (1 - rate)
