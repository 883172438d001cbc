"""Rounds: batches that are absent, gradients that are missing, and the optimum all the same."""

import statistics

import pytest
import torch

from tests.optim.least_squares import PROBLEM, rounds, sisa, step
from torchpisa import PISA, SISA


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
