"""Batches that are skipped: non-finite gradients and GradScaler, decided on host and on device."""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import SISA

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
on_device = pytest.mark.parametrize("capturable", [False, True], ids=["host", "device"])
over_paths = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


def gradient(k):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(k))


def settings(entry, capturable):
    """`capturable` takes the decision on the device, and refuses rules for gamma."""
    plain = {"gamma": 0.99} if "gamma" in entry.settings else {}
    return {"capturable": capturable, **plain}


@each
@on_device
@over_paths
def test_skip_is_absence(entry, capturable, foreach):
    """A skipped batch leaves its dual, moment and counter alone and contributes its dual."""
    p, q = (nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    opt = entry([p], nonfinite="skip", foreach=foreach, **settings(entry, capturable))
    other = entry([q], **settings(entry, False))
    for k in range(12):
        slot = k % opt.batches
        bad = k in (0, 4, 7)
        p.grad = gradient(k)
        if bad:
            p.grad[0, 0] = float("nan")
        opt.step(batch=slot)
        if not bad:
            q.grad = gradient(k)
            other.step(batch=slot)
        elif opt.batches == 1:
            # Nobody was there: the round counts, for gamma, but nothing moves.
            q.grad = None
            other.step()
        if slot == opt.batches - 1:
            other.flush()
    torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
    for key in opt.state[p]:
        if key.startswith(("dual", "moment", "step")):
            torch.testing.assert_close(
                opt.state[p][key], other.state[q][key], rtol=1e-5, atol=1e-6, msg=key
            )
    assert opt.iteration == other.iteration == 12 // opt.batches


@each
@on_device
@over_paths
def test_a_round_of_skipped_batches_moves_nothing(entry, capturable, foreach):
    p = nn.Parameter(torch.ones(4, 3))
    opt = entry([p], nonfinite="skip", foreach=foreach, **settings(entry, capturable))
    for k in range(2 * opt.batches):
        p.grad = gradient(k)
        opt.step()
    before = p.detach().clone()
    (key, *_) = (key for key in opt.state[p] if key.startswith("dual"))
    dual = opt.state[p][key].clone()
    for _ in range(opt.batches):
        p.grad = torch.full((4, 3), float("inf"))
        opt.step()
    assert torch.equal(p.detach(), before)
    assert torch.equal(opt.state[p][key], dual)
    assert opt.iteration == 3


@on_device
@over_paths
def test_skipped_batch_and_missing_gradient_in_one_round(capturable, foreach):
    """Batch 1 is skipped; the parameter it did not reach must not take its zero-gradient step."""
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    settings = {"capturable": capturable, "foreach": foreach, "weight_decay": 0.1}
    opt = SISA([a, b], batches=2, nonfinite="skip", **settings)
    a.grad = b.grad = torch.ones(2)
    opt.step()
    a.grad, b.grad = torch.full((2,), float("nan")), None
    opt.step()
    assert opt.synced
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert not opt.state[b]["dual.1"].any()
    assert opt.state[b]["step.1"] == 0


def test_ignore_does_not_look():
    p = nn.Parameter(torch.ones(2))
    opt = SISA([p], nonfinite="ignore")
    p.grad = torch.tensor([1.0, float("nan")])
    opt.step()
    assert p[1].isnan()


def test_large_is_not_infinite():
    """float16 gradients whose norm float16 cannot hold, and float32 ones whose square overflows."""
    p = nn.Parameter(torch.ones(64, dtype=torch.float16))
    q = nn.Parameter(torch.ones(2))
    for mode in ("raise", "skip"):
        opt = SISA([p], nonfinite=mode)
        p.grad = torch.full((64,), 6e4, dtype=torch.float16)
        opt.step()
        assert opt.state[p]["step.0"] == 1
    opt = SISA([q])
    q.grad = torch.full((2,), 1e30)
    opt.step()
    assert opt.state[q]["step.0"] == 1


class TestGradScaler:
    def train(self, scaled, batches, infinite_at=()):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        opt = SISA(model.parameters(), batches=batches)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for k in range(12):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k))
            opt.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            if k in infinite_at:
                model.weight.grad[0, 0] = float("inf")
            scaler.step(opt)
            scaler.update()
        return model, opt, scaler

    @pytest.mark.parametrize("batches", [1, 3])
    def test_equals_training_without(self, batches):
        plain, _, _ = self.train(False, batches)
        scaled, _, _ = self.train(True, batches)
        torch.testing.assert_close(plain.weight, scaled.weight, rtol=1e-5, atol=1e-7)

    def test_infinities_leave_out_a_step_of_one_batch(self):
        model, opt, scaler = self.train(True, 1, infinite_at=(4,))
        assert scaler.get_scale() == 512.0
        assert opt.iteration == 11
        assert torch.isfinite(model.weight).all()

    def test_infinities_use_up_their_slot_and_poison_nothing(self):
        batches = 3
        model, opt, scaler = self.train(True, batches, infinite_at=(4,))
        assert scaler.get_scale() == 512.0
        assert opt.iteration == 12 // batches
        assert torch.isfinite(model.weight).all()
        slot = 4 % batches
        assert opt.state[model.weight][f"step.{slot}"] == 12 // batches - 1
        for state in opt.state.values():
            assert all(torch.isfinite(torch.as_tensor(v)).all() for v in state.values())

    def test_after_unscale(self):
        """`scaler.unscale_` first, to look at gradients: the scale must not be taken twice."""
        torch.manual_seed(0)
        ends = []
        for unscale in (False, True):
            model = nn.Linear(3, 2)
            nn.init.ones_(model.weight)
            opt = SISA(model.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
            if unscale:
                scaler.unscale_(opt)
            scaler.step(opt)
            ends.append(model.weight.detach().clone())
        torch.testing.assert_close(ends[0], ends[1])
