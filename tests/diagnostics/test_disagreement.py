"""NSISA warns when the batches hardly agree: of digits sorted by label, not of shuffled ones."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from torchpisa import NSISA, SISA
from torchpisa.diagnostics import Diagnostics


def train(make, kind, batches, batch_size, rounds=20, every=5):
    """Return the warnings of a training on `batches` parts of the digits, sorted or shuffled."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(len(y), generator=generator)
    parts = (y.argsort(stable=True) if kind == "sorted" else shuffled).chunk(batches)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    opt = make(model.parameters(), batches=batches)
    with warnings.catch_warnings(record=True) as caught, Diagnostics(opt, every=every):
        warnings.simplefilter("always")
        for _ in range(rounds):
            for part in parts:
                index = part[torch.randint(len(part), (batch_size,), generator=generator)]
                opt.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                opt.step()
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("batches", [2, 4, 10])
def test_sorted_digits_warn_once(batches, batch_size):
    (message,) = train(NSISA, "sorted", batches, batch_size)
    assert f"the {batches} batches hardly agree at iteration 10: the mean cosine" in message
    assert "use MISA or SISA, or shuffle the data" in message


@pytest.mark.parametrize("batch_size", [4, 64])
@pytest.mark.parametrize("batches", [1, 2, 4, 10])
def test_shuffled_digits_do_not(batches, batch_size):
    assert not train(NSISA, "shuffled", batches, batch_size)


@pytest.mark.parametrize("make", [SISA])
def test_those_that_need_no_warning_do_not(make):
    assert not train(make, "sorted", 10, 64)
