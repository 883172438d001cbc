"""Stages of MISA's consensus against their formulas, and what they are invariant to."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.reference import stages
from torchpisa.preconditioners.consensus import EigenbasisMoment, Stage, Whiten, symmetric
from torchpisa.preconditioners.consensus.whiten import inverse_root

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
ROUNDS = 24
STAGES = [
    Whiten(),
    Whiten(power=0.5, every=3, beta=0.8, eps=1e-4),
    EigenbasisMoment(),
    EigenbasisMoment("both", every=3, beta=0.8, eps=1e-3),
]


def gradients(rounds: int, n: int, k: int, seed: int = 0, decades: float = 2) -> Tensor:
    """Gradients whose rows and columns are correlated, and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, **DOUBLE)).Q for size in (n, k)
    )
    left = left * torch.logspace(0, -decades, n, **DOUBLE)
    right = torch.logspace(0, -decades / 2, k, **DOUBLE)[:, None] * right
    return left @ torch.randn(rounds, n, k, generator=generator, **DOUBLE) @ right


def averages(gs: Tensor) -> Tensor:
    """Something like momentum, by round."""
    us, u = [], torch.zeros_like(gs[0])
    for g in gs:
        u = 0.7 * u - 0.3 * g
        us.append(u - 0.3 * g)
    return torch.stack(us)


def applied(stage: Stage, us: Tensor, gs: Tensor) -> list[Tensor]:
    """Apply a stage to one matrix, round by round."""
    n, k = us.shape[1:]
    state = {name: value[None] for name, value in stage.init_state(n, k, us).items()}
    results = []
    for t, (u, g) in enumerate(zip(us, gs, strict=True)):
        result, new = stage.apply(u[None], g[None], state, t)
        state = {**state, **new}
        results.append(result[0])
    return results


def literally(stage: Stage, us: Tensor, gs: Tensor) -> list[Tensor]:
    arrays = [u.numpy() for u in us], [g.numpy() for g in gs]
    if isinstance(stage, Whiten):
        results = stages.whiten(*arrays, stage.power, stage.beta, stage.every, stage.eps)
    else:
        assert isinstance(stage, EigenbasisMoment)
        both = stage.sides == "both"
        numbers = stage.beta, stage.every, stage.eps
        results = stages.eigenbasis_moment(*arrays, both, *numbers)
    return [torch.from_numpy(result) for result in results]


@pytest.mark.parametrize("stage", STAGES, ids=repr)
@pytest.mark.parametrize("shape", [(4, 7), (6, 6), (1, 5)], ids=str)
def test_is_the_formula(stage: Stage, shape: tuple[int, int]) -> None:
    # Half-way other rows and columns become the large ones, and change places in the basis.
    gs = gradients(ROUNDS, *shape)
    gs[ROUNDS // 2 :] = 3 * gradients(ROUNDS // 2, *shape, seed=1)
    us = averages(gs)
    pairs = zip(applied(stage, us, gs), literally(stage, us, gs), strict=True)
    for t, (result, expected) in enumerate(pairs):
        error = (result - expected).norm() / expected.norm()
        assert error < 1e-7, (t, error)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_a_batch_is_its_matrices(stage: Stage) -> None:
    gs = torch.stack([gradients(12, 5, 8, seed) for seed in range(3)], dim=1)
    states = [stage.init_state(5, 8, gs) for _ in range(3)]
    state = {name: torch.stack([each[name] for each in states]) for name in stage.names}
    for t, g in enumerate(gs):
        together, new = stage.apply(g, g, state, t)
        state |= new
    for i in range(3):
        alone = applied(stage, gs[:, i], gs[:, i])[-1]
        torch.testing.assert_close(together[i], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_float32_is_near_float64(stage: Stage) -> None:
    gs = gradients(ROUNDS, 16, 16)
    us = averages(gs)
    expected = applied(stage, us, gs)[-1]
    result = applied(stage, us.float(), gs.float())[-1]
    # The root is in bfloat16; eigenvectors differ where eigenvalues are close.
    assert (result.double() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("stage", STAGES, ids=repr)
def test_the_scale_of_gradients_does_not_matter(stage: Stage) -> None:
    gs = gradients(ROUNDS, 5, 8)
    us = averages(gs)
    expected = applied(stage, us, gs)[-1]
    for scale in (1e-12, 1e12):
        result = applied(stage, scale * us, scale * gs)[-1]
        result = result / result.norm() * expected.norm()
        torch.testing.assert_close(result, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("stage", STAGES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_without_gradients_stays_zero_and_learns_later(
    stage: Stage, dtype: torch.dtype
) -> None:
    gs = gradients(ROUNDS, 5, 8).to(dtype)
    gs[:3] = 0
    results = applied(stage, gs, gs)
    assert all(not result.any() for result in results[:3])
    assert all(result.isfinite().all() and result.any() for result in results[3:])


def spread(x: Tensor) -> float:
    values = torch.linalg.svdvals(x)
    return (values[0] / values[-1]).item()


def test_whitening_by_a_half_is_the_polar_factor() -> None:
    """C^(-1/2) g of the gradient that C is made of has equal singular values."""
    g = gradients(1, 6, 9, decades=1)
    assert spread(g[0]) > 20
    (result,) = applied(Whiten(power=0.5, beta=0.0, every=1, eps=1e-7), g, g)
    assert spread(result) < 1.01
    (quarter,) = applied(Whiten(power=0.25, beta=0.0, every=1, eps=1e-7), g, g)
    assert spread(quarter) == pytest.approx(spread(g[0]) ** 0.5, rel=1e-2)


def test_whitening_by_a_half_forgets_how_rows_are_mixed() -> None:
    """With M g for g, C^(-1/2) U is only rotated, whatever M: its singular values stay."""
    gs = gradients(ROUNDS, 6, 9, decades=0.5)
    us = averages(gs)
    mixing = torch.randn(6, 6, generator=torch.Generator().manual_seed(7), **DOUBLE)
    stage = Whiten(power=0.5, every=1, eps=1e-7)
    before, after = applied(stage, us, gs)[-1], applied(stage, mixing @ us, mixing @ gs)[-1]
    values = [torch.linalg.svdvals(x) / x.norm() for x in (before, after)]
    torch.testing.assert_close(*values, rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    "stage", [Whiten(), EigenbasisMoment(every=1), EigenbasisMoment("both", every=1)], ids=repr
)
def test_turned_matrices_are_turned(stage: Stage) -> None:
    """Rotations of rows commute with a stage; of columns too, where both sides have a basis."""
    generator = torch.Generator().manual_seed(3)
    rows, columns = (
        torch.linalg.qr(torch.randn(size, size, generator=generator, **DOUBLE)).Q for size in (4, 6)
    )
    if not isinstance(stage, Whiten) and stage.sides == "smaller":  # type: ignore[attr-defined]
        columns = torch.eye(6, **DOUBLE)
    # One gradient again and again, until the eigenvectors of both are found.
    gs = gradients(1, 4, 6).expand(400, 4, 6)
    expected = rows @ applied(stage, gs, gs)[-1] @ columns
    if isinstance(stage, EigenbasisMoment) and stage.sides == "both":
        # Two columns of a 4 x 6 matrix have no gradient, and no direction.
        gs = gradients(1, 4, 4).expand(400, 4, 4)
        columns = columns[:4, :4]
        columns = torch.linalg.qr(columns).Q
        expected = rows @ applied(stage, gs, gs)[-1] @ columns
    turned = rows @ gs @ columns
    torch.testing.assert_close(applied(stage, turned, turned)[-1], expected, rtol=1e-5, atol=1e-6)


def test_orthogonal_iteration_finds_the_eigenvectors() -> None:
    g = gradients(1, 12, 30)[0].float()
    stage = EigenbasisMoment(every=1, beta=0.0)
    state = {name: value[None] for name, value in stage.init_state(12, 30, g).items()}
    for t in range(60):
        _, new = stage.apply(g[None], g[None], state, t)
        state |= new
    q = state["basis"][0].double()
    torch.testing.assert_close(q.T @ q, torch.eye(12, **DOUBLE), rtol=0, atol=1e-5)
    inner = q.T @ (g @ g.T).double() @ q
    roots = inner.diagonal().sqrt()
    assert roots.diff().max() <= 0  # the largest first
    correlations = inner / (roots[:, None] * roots) - torch.eye(12, **DOUBLE)
    assert correlations.abs().max() < 0.02


@pytest.mark.parametrize("power", [0.5, 0.25])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-2)])
def test_inverse_roots_by_products(power: float, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(3, 40, 40, generator=generator, **DOUBLE)).Q
    values = torch.logspace(-6, 0, 40, **DOUBLE)
    a = (vectors * values) @ vectors.mT
    root = inverse_root(a.to(dtype), power, 1e-6).double()
    expected = (vectors * values**-power) @ vectors.mT
    errors = (root - expected).norm(dim=(1, 2)) / expected.norm(dim=(1, 2))
    assert errors.max() < tolerance


def test_bytes_of_state() -> None:
    """The bytes in the documentation, per parameter of a matrix in float32."""
    like = torch.zeros(())

    def per_parameter(stage: Stage, n: int, k: int) -> float:
        state = stage.init_state(n, k, like)
        assert set(state) == set(stage.names)
        return sum(x.numel() * x.element_size() for x in state.values()) / (n * k)

    # A folded triangle has n + 1 numbers more than half of the matrix, at most.
    assert per_parameter(Whiten(), 256, 256) == pytest.approx(3, rel=0.01)
    assert per_parameter(Whiten(), 256, 1024) == pytest.approx(0.75, rel=0.01)
    assert per_parameter(EigenbasisMoment(), 256, 256) == pytest.approx(10, rel=0.01)
    assert per_parameter(EigenbasisMoment(), 256, 1024) == pytest.approx(5.5, rel=0.01)
    assert per_parameter(EigenbasisMoment("both"), 256, 256) == pytest.approx(16, rel=0.01)
    assert per_parameter(EigenbasisMoment("both"), 256, 1024) == pytest.approx(29.5, rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 10])
def test_packed_triangles(n: int) -> None:
    a = torch.randn(3, n, n, generator=torch.Generator().manual_seed(n))
    a = a + a.mT
    folded = symmetric.pack(a)
    assert folded.shape == (3, *symmetric.packed_shape(n))
    assert folded[0].numel() <= n * (n + 1) / 2 + (n + 1) / 2
    assert torch.equal(symmetric.unpack(folded), a)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Whiten(power=1.0), r"power must be 0\.25 or 0\.5, got 1\.0"),
        (lambda: Whiten(beta=1.0), r"beta must be in \[0, 1\), got 1\.0"),
        (lambda: Whiten(every=0), r"every must be an integer >= 1, got 0"),
        (lambda: Whiten(eps=0.0), r"eps must be in \[1e-07, 1\], got 0\.0"),
        (
            lambda: EigenbasisMoment("left"),  # type: ignore[arg-type]
            r"sides must be one of 'smaller', 'both', got 'left'",
        ),
        (lambda: EigenbasisMoment(beta=-0.1), r"beta must be in \[0, 1\), got -0\.1"),
        (lambda: EigenbasisMoment(every=2.5), r"every must be an integer >= 1, got 2\.5"),  # type: ignore[arg-type]
        (lambda: EigenbasisMoment(eps=0.0), r"eps must be a finite number > 0, got 0\.0"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
