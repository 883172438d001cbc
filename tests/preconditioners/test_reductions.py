"""Known reductions: settings in which the optimizers must coincide with something known."""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.algorithms.nsisa import newton_schulz
from torchpisa.preconditioners import LocalProblem, NewtonSchulz, Preconditioner


def gradients(count, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=dtype, generator=generator) for _ in range(count)]


def test_identity_closed_form_on_a_quadratic():
    """PISA with Q = I on h/2 w^2: the iteration matrix of heavy ball, applied k times."""
    h, sigma, rho = 0.8, 1.5, 2.5
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = PISA([w], sigma=sigma, rho=rho)
    b, a = rho / (sigma + rho), 1 / (sigma + rho)
    transition = torch.tensor([[1 - a * h, b - a * h], [-a * h, b - a * h]], dtype=torch.float64)
    state = torch.tensor([1.0, 0.0], dtype=torch.float64)  # x and y; w is x + y
    for _ in range(40):
        w.grad = h * w.detach()
        opt.step()
        state = transition @ state
        torch.testing.assert_close(w.detach()[0], state.sum(), rtol=1e-11, atol=1e-14)


@pytest.mark.filterwarnings("ignore::torchpisa.optim.guard.DivergenceWarning")
@pytest.mark.parametrize(("h", "stable"), [(1.99, True), (2.01, False)])
def test_stability_limit(h, stable):
    """Stable iff h < (2/3)(sigma + 2 rho q): here the limit is 2."""
    w = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    opt = PISA([w], sigma=1.0, rho=1.0)
    for _ in range(4000):
        w.grad = h * w.detach()
        opt.step()
    assert (w.abs() < 1e-3) == stable


RHO = 200.0


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"scheme": "adagrad"}, lambda p: torch.optim.Adagrad(p, lr=2 / RHO, eps=0.0)),
        (
            {"scheme": "rmsprop", "beta": 0.9},
            lambda p: torch.optim.RMSprop(p, lr=2 / RHO, alpha=0.9, eps=0.0),
        ),
        (
            {"scheme": "adam", "beta": 0.99},
            lambda p: torch.optim.Adam(p, lr=2 / RHO, betas=(0.0, 0.99), eps=0.0),
        ),
    ],
    ids=["scheme 1 is Adagrad", "scheme 2 is RMSprop", "scheme 3 is Adam without momentum"],
)
def test_small_sigma_and_no_dual_are_a_known_optimizer(settings, known):
    """With sigma -> 0 and the dual zeroed, w moves by 2 sigma d / sigma = 2 d."""
    ours, theirs = (nn.Parameter(torch.ones(3, 4, dtype=torch.float64)) for _ in range(2))
    opt, reference = SISA([ours], sigma=1e-13, rho=RHO, dual_decay=0.0, **settings), known([theirs])
    for g in gradients(50, (3, 4)):
        ours.grad = theirs.grad = g
        opt.step()
        reference.step()
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_nsisa_with_large_sigma_takes_muons_direction(shape, nesterov):
    """x = w - pi/sigma moves by o/sigma, as Muon with learning rate 1/sigma does."""
    sigma, rho = 1e7, 1.0
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    opt = NSISA([ours.double().detach().requires_grad_()], sigma=sigma, rho=rho, nesterov=nesterov)
    w = opt.param_groups[0]["params"][0]
    muon = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, nesterov=nesterov, momentum=0.95)
    x = w.detach().clone()
    for g in gradients(10, shape):
        before = theirs.detach().clone()
        w.grad, theirs.grad = g, g.float()
        opt.step()
        muon.step()
        moved = (w.detach() - opt.state[w]["dual.0"] / sigma) - x
        x = x + moved
        muons = (theirs.detach() - before).double()
        cosine = (moved * muons).sum() / (moved.norm() * muons.norm())
        assert cosine > 0.999, "Muon computes in bfloat16, nothing else may differ"


def test_newton_schulz_is_close_to_the_polar_factor():
    for b in [torch.randn(5, 3), torch.randn(3, 5), torch.randn(4, 4), torch.randn(7, 6, 2)]:
        u, _, v = torch.linalg.svd(newton_schulz(b.double()), full_matrices=False)
        s = torch.linalg.svdvals(newton_schulz(b.double()))
        assert s.max() < 1.3
        polar_u, _, polar_v = torch.linalg.svd(b.double(), full_matrices=False)
        overlap = ((u @ v) * (polar_u @ polar_v)).sum() / (u @ v).square().sum()
        assert overlap > 0.99


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e30])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_newton_schulz_does_not_care_about_scale(scale, dtype):
    b = torch.randn(6, 4)
    torch.testing.assert_close(
        newton_schulz(scale * b, dtype=dtype), newton_schulz(b, dtype=dtype), rtol=3e-2, atol=3e-2
    )
    assert not newton_schulz(torch.zeros(3, 2), dtype=dtype).any()


@pytest.mark.parametrize("shape", [(8, 2), (2, 8), (8, 1, 2), (3, 3)])
def test_aspect_scaling(shape):
    """o is multiplied by the root of rows/cols for tall matrices only, convolutions flattened."""
    b = torch.randn(shape)
    plain = NewtonSchulz().orthogonalize(b)
    scaled = NewtonSchulz(aspect_scaling=True).orthogonalize(b)
    torch.testing.assert_close(scaled, plain * (2.0 if shape[0] == 8 else 1.0))


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if "batches" not in e.settings], ids=lambda e: e.name
)
@pytest.mark.parametrize("m", [2, 5])
def test_identical_batches_equal_one_batch(entry, m):
    one, many = (nn.Parameter(torch.ones(4, 3, dtype=torch.float64)) for _ in range(2))
    same = {} if entry.make in (NSISA, MISA) else {"sigma": 3.0, "rho": 50.0}
    a = entry([one], **same)
    b = entry([many], batches=m, weights=list(range(1, m + 1)), **same)
    for noise in gradients(30, (4, 3)):
        for opt, p, times in ((a, one, 1), (b, many, m)):
            for _ in range(times):
                p.grad = noise + p.detach()
                opt.step()
    assert b.iteration == 30
    torch.testing.assert_close(one.detach(), many.detach(), rtol=1e-10, atol=1e-12)


class RowMoment(Preconditioner):
    """A user's own: one second moment per row, as in the documentation."""

    def init(self, param):
        return {"rows": torch.zeros(param.shape[0], dtype=param.dtype)}

    def solve(self, problem: LocalProblem, state):
        square = problem.residual.square().mean(dim=1)
        rows = 0.9 * state["rows"] + 0.1 * square
        root = (rows / (1 - 0.9**problem.step)).sqrt().unsqueeze(1)
        return -problem.residual / (problem.sigma + problem.rho * root), {"rows": rows}


def test_own_preconditioner():
    """State of another shape, kept per batch, saved and loaded like any other."""
    w = nn.Parameter(torch.ones(3, 2))
    opt = PISA([w], RowMoment(), sigma=1.0, rho=2.0, batches=2)
    for g in gradients(20, (3, 2), torch.float32):
        w.grad = w.detach() + 0.01 * g
        opt.step()
    assert w.abs().max() < 0.2
    assert opt.state[w]["rows.1"].shape == (3,)
    other = PISA([w], RowMoment(), batches=2)
    other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[w]["rows.1"], opt.state[w]["rows.1"])
