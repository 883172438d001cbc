"""The rules that keep it ADMM: on heterogeneous batches the optimum is reached, and by the tempting
alternatives that a user can choose it is not."""

import statistics

import pytest
import torch

from tests.optim.least_squares import LeastSquares
from torchpisa import NSISA, PISA, SISA

PROBLEM = LeastSquares()


def sisa(w, **settings):
    """SISA as the rules are tested with: sigma at the curvature, everything else unequal."""
    chosen = {"sigma": PROBLEM.curvature, "rho": 1.0, "batches": PROBLEM.m, **settings}
    return SISA([w], weights=PROBLEM.weights, **chosen)


def step(opt, w, i, **kwargs):
    opt.zero_grad()
    PROBLEM.loss(i, w).backward()
    opt.step(batch=i, **kwargs)


def rounds(opt, w, count, present=lambda round_: range(PROBLEM.m), before=lambda round_: None):
    for k in range(count):
        before(k)
        for i in present(k):
            step(opt, w, i)
        opt.flush()


def test_full_rounds_reach_the_optimum():
    w = PROBLEM.start()
    rounds(sisa(w), w, 120)
    assert PROBLEM.error(w) < 1e-8


def test_thirty_percent_present():
    generator = torch.Generator().manual_seed(1)
    w = PROBLEM.start()
    some = lambda k: torch.randperm(PROBLEM.m, generator=generator)[:3].tolist()  # noqa: E731
    rounds(sisa(w), w, 400, some)
    assert PROBLEM.error(w) < 1e-8


def test_flush_takes_the_rule_for_absent_batches():
    """Pi += D; w += (Pi + D) / S, the server's form of the same rule."""
    w = PROBLEM.start()
    opt = PISA([w], sigma=2.0, rho=3.0, batches=PROBLEM.m, weights=PROBLEM.weights)
    rounds(opt, w, 3)
    pi = {i: opt.state[w][f"dual.{i}"].clone() for i in range(PROBLEM.m)}
    total = sum(a * pi[i] for i, a in enumerate(PROBLEM.weights))
    expected, delta = w.detach().clone(), torch.zeros_like(w)
    for i in (7, 2):
        (g,) = torch.autograd.grad(PROBLEM.loss(i, w), w)
        delta += PROBLEM.weights[i] * 2.0 * -(pi[i] + g) / (2.0 + 3.0)
        step(opt, w, i)
    opt.flush()
    expected += (total + delta + delta) / 2.0
    torch.testing.assert_close(w.detach(), expected, rtol=1e-12, atol=0)
    for i in set(range(PROBLEM.m)) - {7, 2}:
        assert torch.equal(opt.state[w][f"dual.{i}"], pi[i])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda k: max(0.5, 0.97**k),
        lambda k: min(1.0, k / 60),
        lambda k: float(not 20 <= k < 40),
    ],
    ids=["decaying", "warming up from zero", "zero in mid-run"],
)
def test_lr_schedules_reach_the_optimum(schedule):
    w = PROBLEM.start()
    opt = sisa(w)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, schedule)
    for _ in range(220):
        rounds(opt, w, 1)
        scheduler.step()
    assert PROBLEM.error(w) < 1e-8


def test_lr_zero_moves_duals_only():
    w = PROBLEM.start()
    before = w.detach().clone()
    opt = sisa(w, lr=0.0, consensus_decay=0.1)
    rounds(opt, w, 5)
    assert torch.equal(w.detach(), before)
    assert opt.state[w]["dual.0"].abs().max() > 0


def test_lr_equals_dividing_sigma_and_rho():
    ends = []
    for settings in ({"lr": 0.25}, {"sigma": 4 * PROBLEM.curvature, "rho": 4.0}):
        w = PROBLEM.start()
        rounds(sisa(w, consensus_decay=0.3, **settings), w, 50)
        ends.append(w.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-14)


def test_clipping_the_residual_reaches_the_optimum():
    w = PROBLEM.start()
    opt = sisa(w, clip=1.0)
    first = [float(torch.autograd.grad(PROBLEM.loss(i, w), w)[0].norm()) for i in range(PROBLEM.m)]
    assert max(first) > 10, "the clip must bite for the test to say anything"
    rounds(opt, w, 120)
    assert PROBLEM.error(w) < 1e-8


def test_clipping_gradients_does_not():
    w = PROBLEM.start()
    opt = sisa(w)
    for _ in range(120):
        for i in range(PROBLEM.m):
            opt.zero_grad()
            PROBLEM.loss(i, w).backward()
            torch.nn.utils.clip_grad_norm_([w], 1.0)
            opt.step()
    assert PROBLEM.error(w) > 0.1


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_clip_is_the_norm_over_all_parameters(foreach):
    """Two groups, two dtypes: one norm over everything."""
    a = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    b = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    opt = PISA([{"params": [a]}, {"params": [b]}], sigma=1.0, rho=0.0, clip=1.5, foreach=foreach)
    a.grad, b.grad = torch.tensor([2.0, 4.0]), torch.tensor([4.0], dtype=torch.float64)  # norm 6
    opt.step()
    torch.testing.assert_close(a.detach(), torch.tensor([0.0, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(b.detach(), torch.zeros(1).double(), atol=1e-6, rtol=0)


def test_gradients_missing_at_random():
    """Batch i's mini-batches reach the parameter with probability p_i, so the objective is
    sum a_i p_i F_i. Counting a missing gradient as zero keeps approaching its optimum as lr falls;
    freezing the batch (as if absent) stalls at another point."""
    generator = torch.Generator().manual_seed(3)
    chances = torch.linspace(0.3, 1.0, PROBLEM.m, dtype=torch.float64)
    shares = [a * float(p) for a, p in zip(PROBLEM.weights, chances, strict=True)]
    hessian = sum(s * a.T @ a / len(a) for s, a in zip(shares, PROBLEM.a, strict=True))
    slope = sum(s * a.T @ b / len(a) for s, a, b in zip(shares, PROBLEM.a, PROBLEM.b, strict=True))
    optimum = torch.linalg.solve(hessian, slope)
    count = 300
    reached = torch.rand(count, PROBLEM.m, generator=generator, dtype=torch.float64) < chances

    def errors(freeze):
        w = PROBLEM.start()
        opt = sisa(w)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (1 + k / 8))
        distances = []
        for k in range(count):
            for i in range(PROBLEM.m):
                opt.zero_grad()
                if reached[k, i]:
                    PROBLEM.loss(i, w).backward()
                if reached[k, i] or not freeze:
                    opt.step(batch=i)
            opt.flush()
            schedule.step()
            distances.append(float((w.detach() - optimum).norm()))
        return statistics.mean(distances[20:40]), statistics.mean(distances[-40:])

    early, late = errors(freeze=False)
    assert late < 0.3 * early
    early_wrong, late_wrong = errors(freeze=True)
    assert late_wrong > 0.8 * early_wrong
    assert late_wrong > 5 * late


def test_parameter_without_gradient_in_a_whole_round_is_left_alone():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = SISA([a, b], sigma=1.0, rho=1.0, batches=2, consensus_decay=0.1, weight_decay=0.1)
    for _ in range(2):
        a.grad, b.grad = torch.ones(2), None
        opt.step()
    assert torch.equal(b.detach(), torch.ones(2))
    assert not opt.state[b]["dual.0"].any()
    assert opt.state[b]["step.0"] == 0
    assert (a < 1).all()


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_parameter_reached_by_some_batches_has_gradient_zero_in_the_others(foreach, order):
    ends = []
    for zeros in (False, True):
        p = torch.nn.Parameter(torch.ones(3))
        opt = SISA([p], sigma=1.0, rho=2.0, batches=2, weight_decay=0.1, foreach=foreach)
        for k in range(6):
            for i in order:
                p.grad = torch.tensor([1.0, -2.0, 0.5]) * (k + 1)
                if i == 1:
                    p.grad = torch.zeros(3) if zeros else None
                opt.step(batch=i)
        ends.append((p.detach().clone(), opt.state[p]["dual.1"].clone(), opt.iteration))
    assert ends[0][2] == ends[1][2] == 6
    torch.testing.assert_close(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], ends[1][1])


def test_dual_decay_moves_the_fixed_point():
    """Where the undecayed run of as many rounds is at the optimum, above."""
    w = PROBLEM.start()
    rounds(sisa(w, dual_decay=0.99), w, 120)
    assert PROBLEM.error(w) > 1e-3


@pytest.mark.parametrize("q", [0.3, 1.0, 4.0])
def test_one_batch_is_heavy_ball_with_a_look_ahead(q):
    """y+ = b y - g(x + y)/(sigma + rho q), x+ = x + y+, over 300 steps; x + y is w."""
    sigma, rho = 0.7, 2.0 * q
    a = PROBLEM.a[3] / PROBLEM.curvature**0.5
    gradient = lambda w: a.T @ (a @ w - PROBLEM.b[3]) / len(a)  # noqa: E731
    w = PROBLEM.start()
    opt = PISA([w], sigma=sigma, rho=rho)
    x, y = w.detach().clone(), torch.zeros_like(w)
    b = rho / (sigma + rho)
    for _ in range(300):
        w.grad = gradient(w.detach())
        y = b * y - gradient(x + y) / (sigma + rho)
        x = x + y
        opt.step()
        torch.testing.assert_close(w.detach(), x + y, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(opt.state[w]["dual.0"] / sigma, y, rtol=1e-9, atol=1e-11)


def test_with_identity_the_duals_are_one_dual_on_the_averaged_gradient():
    w, v = PROBLEM.start(), PROBLEM.start()
    many = PISA([w], sigma=3.0, rho=5.0, batches=PROBLEM.m, weights=PROBLEM.weights)
    one = PISA([v], sigma=3.0, rho=5.0)
    for _ in range(100):
        rounds(many, w, 1)
        one.zero_grad()
        sum(a * PROBLEM.loss(i, v) for i, a in enumerate(PROBLEM.weights)).backward()
        one.step()
    torch.testing.assert_close(w.detach(), v.detach(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("cls", "expected"), [(NSISA, 1.0), (SISA, 11 / 3)])
def test_nsisa_as_printed_finds_the_median(cls, expected):
    """Targets 0, 1 and 10: NSISA settles where the signs cancel, SISA at the minimum."""
    w = torch.nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    settings = {"momentum": 0.0} if cls is NSISA else {"rho": 1.0}
    opt = cls([w], sigma=20.0, batches=3, gamma=0.999, **settings)
    for _ in range(200):
        for target in (0.0, 1.0, 10.0):
            opt.zero_grad()
            (0.5 * (w - target) ** 2).sum().backward()
            opt.step()
    assert w.item() == pytest.approx(expected, abs=0.05)


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


@pytest.mark.parametrize("make", [SISA, NSISA, PISA])
def test_a_relative_lr_that_looks_absolute_warns(make, recwarn):
    settings = {"sigma": 0.5, "rho": 10.0}
    make([torch.nn.Parameter(torch.ones(2))], **settings)
    make([torch.nn.Parameter(torch.ones(2))], lr=0.5, **settings)
    SISA([torch.nn.Parameter(torch.ones(2))], lr=1e-3)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"lr=0\.001 is relative here"):
        make([torch.nn.Parameter(torch.ones(2))], lr=1e-3, **settings)


def test_groups_in_other_terms_have_the_lr_of_theirs():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = SISA([{"params": [a]}, {"params": [b], "sigma": 0.5, "rho": 10.0}])
    assert [group["lr"] for group in opt.param_groups] == [3e-3, 1.0]


class TestGroupsOfNSISA:
    def params(self):
        return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]

    def test_sigma_of_a_group_is_for_matrices(self):
        for opt in (
            NSISA([{"params": self.params(), "sigma": 40.0}]),
            NSISA(self.params(), sigma=40.0),
        ):
            (group,) = opt.param_groups
            assert (group["sigma"], group["sisa_sigma"]) == ([40.0], None)

    def test_a_tensor_lr_is_reduced_once(self):
        opt = NSISA(self.params(), lr=torch.tensor(1.0))
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
        scheduler.step(1.0)
        scheduler.step(2.0)
        assert [float(group["lr"]) for group in opt.param_groups] == [0.5]

    def test_an_empty_group_stays_a_group(self):
        opt = NSISA([{"params": []}, {"params": self.params()[:1]}])
        assert [len(group["params"]) for group in opt.param_groups] == [0, 1]
        opt.param_groups[1]["params"][0].grad = torch.ones(3, 2)
        opt.step()

    def test_a_refused_group_leaves_nothing_behind(self):
        opt = NSISA(self.params())
        matrix = torch.nn.Parameter(torch.ones(4, 2))
        before = len(opt.state)
        with pytest.raises(ValueError, match="params must be"):
            opt.add_param_group({"params": [matrix, torch.zeros(2, dtype=torch.long)]})
        assert len(opt.state) == before
        assert len(opt.param_groups) == 1
        opt.state_dict()

    def test_groups_stay_the_users(self):
        """Number, order and settings: what schedulers with one function per group need."""
        matrix, vector = self.params()
        groups = [{"params": [vector], "lr": 0.5}, {"params": [matrix, vector.clone().detach()]}]
        opt = NSISA(groups)
        assert [len(group["params"]) for group in opt.param_groups] == [1, 2]
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, [lambda _: 0.5, lambda _: 2.0])
        assert [group["lr"] for group in opt.param_groups] == [0.25, 2.0]
        assert len(scheduler.base_lrs) == 2

    @pytest.mark.parametrize("sisa_sigma", [None, 0.5])
    def test_a_checkpoint_with_split_groups_is_put_together(self, sisa_sigma):
        """Earlier versions wrote a group of matrices and one of the rest for each group."""
        vector, matrix = self.params()[::-1]
        opt = NSISA([vector, matrix], sisa_sigma=sisa_sigma)
        for _ in range(3):
            for p in (vector, matrix):
                p.grad = torch.ones_like(p)
            opt.step()
        new = opt.state_dict()
        (group,) = new["param_groups"]
        rest = {"sigma": group["sisa_sigma"], "rho": group["sisa_rho"], "matrix": False}
        old = {
            # Numbered by group: the matrix first.
            "state": {0: new["state"][1], 1: new["state"][0]},
            "param_groups": [
                {**group, "matrix": True, "params": [0]},
                {**group, **rest, "params": [1]},
            ],
        }
        other = NSISA([p.detach().clone().requires_grad_() for p in (vector, matrix)])
        other.load_state_dict(old)
        torch.testing.assert_close(other.state_dict()["state"], new["state"], rtol=0, atol=0)
        assert other.state_dict()["param_groups"] == [group]


@pytest.mark.parametrize("make", [SISA, NSISA, PISA])
def test_a_negative_lr_is_refused_before_a_dual_has_changed(make):
    """Also in the batch that ends a round, whose local step comes before the consensus."""
    w = torch.nn.Parameter(torch.ones(3, 2))
    opt = make([w], batches=2)
    w.grad = torch.ones(3, 2)
    opt.step()
    before = {key: value.clone() for key, value in opt.state[w].items() if key != "arrived"}
    opt.param_groups[0]["lr"] = -0.1
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got -0\.1"):
        opt.step()
    assert all(torch.equal(opt.state[w][key], value) for key, value in before.items())
    assert opt.batch == 1
