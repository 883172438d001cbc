"""Gradients that are not finite, where the host does not wait to hear of them (as on a GPU)."""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, SISA
from torchpisa.optim import nonfinite

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(nonfinite, "DEFERRED_ON", ["cuda", "cpu"])


def setup(entry, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, entry(model.named_parameters(), foreach=True, **settings)


def give_gradients(model, k):
    generator = torch.Generator().manual_seed(k)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def finite(model, opt):
    held = [v for own in opt.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    return all(tensor.isfinite().all() for tensor in (*model.parameters(), *held))


@each
@pytest.mark.parametrize(("clip", "value"), [(None, float("nan")), (0.5, float("inf"))])
def test_counts_as_zero_and_is_reported_by_the_next_step(entry, clip, value):
    (model, opt), (other, expected) = setup(entry, clip=clip), setup(entry, clip=clip)
    where = ""
    for k in range(7):
        give_gradients(model, k)
        give_gradients(other, k)
        if k == 4:
            where = f"batch {opt.batch} of iteration {opt.iteration}: 1.weight"
            model[1].weight.grad[1, 1] = value
            other[1].weight.grad.zero_()
        if k == 5:
            with pytest.raises(FloatingPointError, match=f"non-finite gradient in {where}\\."):
                opt.step()
        opt.step()
        expected.step()
        assert finite(model, opt)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    opt.flush()


def test_the_default_device_does_not_matter():
    model, opt = setup(ENTRIES[0])
    for k in range(2):
        give_gradients(model, k)
        with torch.device("meta"):
            opt.step()
    assert finite(model, opt)


def test_groups_of_several_dtypes():
    params = [nn.Parameter(torch.ones(2, 2, dtype=d)) for d in (torch.float32, torch.float64)]
    for opt in (MISA(params, foreach=True), SISA(params, foreach=True)):
        for p in params:
            p.grad = torch.ones_like(p)
        params[1].grad[0, 0] = float("nan")
        opt.step()
        with pytest.raises(FloatingPointError, match="parameter 1 of group 0"):
            opt.step()
        assert all(p.isfinite().all() for p in params)


@each
def test_flush_hears_of_it(entry):
    model, opt = setup(entry)
    give_gradients(model, 0)
    model[0].bias.grad[:] = float("inf")
    opt.step()
    with pytest.raises(FloatingPointError, match=r"0\.bias\. .*were left out; nonfinite='skip'"):
        opt.flush()
    opt.flush()
    assert finite(model, opt)


@each
def test_looking_changes_nothing(entry, monkeypatch):
    """Finite gradients give what they give where the host looks before every step."""
    ends = []
    for devices in (["cuda", "cpu"], ["cuda"]):
        monkeypatch.setattr(nonfinite, "DEFERRED_ON", devices)
        model, opt = setup(entry)
        for k in range(6):
            give_gradients(model, k)
            kept = [p.grad.clone() for p in model.parameters()]
            opt.step()
            assert all(
                torch.equal(p.grad, g) for p, g in zip(model.parameters(), kept, strict=True)
            )
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("make", [SISA, MISA])
@pytest.mark.parametrize("number", range(5))
def test_a_bad_gradient_is_found_at_once_wherever_it_is(monkeypatch, make, number):
    """On a CPU; small and large tensors, and those of other dtypes, are looked at in other ways."""
    monkeypatch.setattr(nonfinite, "DEFERRED_ON", ["cuda"])
    small, matrix, large = torch.ones(3), torch.ones(4, 2), torch.ones(nonfinite._SMALL + 1)
    kinds = [small, matrix, large, torch.ones(3, dtype=torch.cfloat), small.double()]
    params = [nn.Parameter(tensor.clone()) for tensor in kinds]
    opt = make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    params[number].grad.view(-1)[-1] = torch.inf
    with pytest.raises(FloatingPointError, match=f"parameter {number} of group 0"):
        opt.step()
    for param, tensor in zip(params, kinds, strict=True):
        assert torch.equal(param, tensor)
