"""Autograd knows that a step has changed the weights, whichever kernel changed them."""

import pytest
import torch
from torch import nn

from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.kernels.cpu import native
from torchpisa.kernels.optional import without_triton
from torchpisa.kernels.triton import plan

WAYS = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "cpu": {"fused": None},
    "native": {"fused": True},
    "triton": {"fused": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_backward_through_stepped_weights_raises(cls, batches, way, monkeypatch):
    if way == "triton":
        if without_triton() is not None:
            pytest.skip("needs Triton")
        monkeypatch.setattr(plan, "DEVICES", ["cuda", "cpu"])
    if way == "native" and native._library() is None:
        pytest.skip("needs a C compiler")
    if (cls is MISA and "fused" in WAYS[way]) or (cls is NSISA and way == "native"):
        pytest.skip("has no such kernel")
    w = nn.Parameter(torch.ones(4, 3))
    x = torch.ones(2, 4, requires_grad=True)
    paper = {"sigma": 0.5, "rho": 1e3} if cls is SISA else {}
    opt = cls([w], batches=batches, **paper, **WAYS[way])
    loss = (x @ w).square().sum()
    for _ in range(batches):
        loss.backward(retain_graph=True)
        opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_so_it_does_where_steps_are_taken_in_c_by_default():
    w = nn.Parameter(torch.ones(1024, 1024))
    x = torch.ones(1, 1024, requires_grad=True)
    opt = SISA([w])
    loss = (x @ w).square().sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
