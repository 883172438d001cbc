"""Groups of matrices and the rest, by the names of a model."""

import pytest
from torch import nn

from torchpisa import NSISA
from torchpisa.optim.param_groups import split


def test_split_keeps_embeddings_and_head_apart():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    opt = NSISA(split(model))
    orthogonalized, rest = (group["param_names"] for group in opt.param_groups)
    assert orthogonalized == ["1.weight"]
    assert rest == ["0.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    assert NSISA(split(model, head=())).param_groups[0]["param_names"] == ["1.weight", "3.weight"]


def test_split_names_unknown_heads():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"head must name modules of the model, got 'lm_head'"):
        split(model, head="lm_head")
