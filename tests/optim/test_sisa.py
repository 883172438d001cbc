"""SISA in the terms of AdamW: without sigma, which then follows the gradients."""

import pytest
import torch

from torchpisa import NSISA, SISA


class TestSigmaThatFollows:
    """SISA without sigma: the largest root mean square of sqrt(m) over each tensor."""

    def test_is_the_formula(self):
        """Two batches, everything written out, against the optimizer."""
        generator = torch.Generator().manual_seed(0)
        w = torch.nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
        expected = w.detach().clone()
        opt = SISA([w], lr=0.02, momentum=0.8, beta=0.9, batches=2, weights=[1, 3])
        duals, moments = ([torch.zeros_like(expected) for _ in range(2)] for _ in range(2))
        sigmas, rho = [0.0, 0.0], 0.8 / 0.2
        for k in range(1, 15):
            total = torch.zeros_like(expected)
            for i, alpha in enumerate((0.25, 0.75)):
                g = torch.randn(5, 3, generator=generator, dtype=torch.float64) / k + i
                w.grad = g
                opt.step()
                r = duals[i] + g
                moments[i] = 0.9 * moments[i] + 0.1 * r.square()
                root = (moments[i] / (1 - 0.9**k)).sqrt()
                sigmas[i] = max(sigmas[i], float(root.square().mean().sqrt()))
                d = -r / (sigmas[i] + rho * root)
                total += alpha * (duals[i] + 2 * sigmas[i] * d)
                duals[i] = duals[i] + sigmas[i] * d
            expected += 0.02 * total / (0.25 * sigmas[0] + 0.75 * sigmas[1])
        torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("foreach", [False, True])
    @pytest.mark.parametrize("make", [SISA, NSISA])
    def test_the_scale_of_the_loss_does_not_matter(self, make, foreach):
        ends = []
        for scale in (1e-3, 1.0, 1e3):
            v = torch.nn.Parameter(torch.linspace(-1, 2, 7, dtype=torch.float64))
            opt = make([v], foreach=foreach)
            for _ in range(40):
                opt.zero_grad()
                (scale * (v**4).sum()).backward()
                opt.step()
            ends.append(v.detach())
        torch.testing.assert_close(ends[0], ends[1], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(ends[2], ends[1], rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("foreach", [False, True])
    def test_first_gradients_may_be_zero(self, foreach):
        v = torch.nn.Parameter(torch.ones(4))
        opt = SISA([v], foreach=foreach)
        for k in range(30):
            v.grad = torch.full((4,), 0.0 if k < 5 else 1.0)
            opt.step()
            assert torch.equal(v, torch.ones(4)) == (k < 5)
        assert torch.isfinite(v).all()

    def test_sigma_never_decreases(self):
        v = torch.nn.Parameter(torch.zeros(4))
        opt = SISA([v])
        seen = []
        for k in range(60):
            v.grad = torch.full((4,), 0.95**k)
            opt.step()
            seen.append(opt.state[v]["sigma.0"].item())
        assert seen == sorted(seen)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"gamma": 0.9}, r"gamma must be 1\.0 without sigma, got 0\.9"),
            ({"initial_consensus": True}, "initial_consensus must be False without sigma"),
            ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1\.0"),
            ({"fused": True}, r"fused=True is not possible: .* give sigma and rho"),
        ],
    )
    def test_what_needs_sigma(self, settings, message):
        with pytest.raises(ValueError, match=message):
            SISA([torch.nn.Parameter(torch.ones(2))], **settings)


def test_groups_in_other_terms_have_the_lr_of_theirs():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = SISA([{"params": [a]}, {"params": [b], "sigma": 0.5, "rho": 10.0}])
    assert [group["lr"] for group in opt.param_groups] == [3e-3, 1.0]


def test_momentum_beside_sigma_is_warned_about():
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    with pytest.warns(UserWarning, match=r"momentum=0\.5 has no effect beside sigma: .* and rho"):
        SISA([vector], sigma=1.0, momentum=0.5)
    with pytest.warns(UserWarning, match=r"sisa_momentum=0\.5 has no effect beside sisa_sigma: "):
        NSISA([matrix, vector], sisa_sigma=1.0, sisa_momentum=0.5)
    # Without effect nowhere; the suite makes errors of warnings.
    SISA(
        [{"params": [matrix], "sigma": None, "rho": None}, {"params": [vector]}],
        sigma=1.0,
        momentum=0.5,
    )
    NSISA([matrix, vector], sisa_momentum=0.5)
