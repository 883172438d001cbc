"""The numbers of a row: against their definitions, as estimates, and at their extremes."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.diagnostics import literal
from tests.optim.table import ENTRIES, Entry
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.diagnostics import Diagnostics
from torchpisa.preconditioners import Preconditioner, SecondMoment

# Noise and unequal data, where it is right to warn.
pytestmark = pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning")

# MISA has one dual for all batches, and nothing to be compared between them.
OURS = [entry for entry in ENTRIES if entry.make is not MISA]
each = pytest.mark.parametrize("entry", OURS, ids=lambda entry: entry.name)

HETEROGENEOUS = {
    "batches": 3,
    "weights": [1, 2, 3],
    "sigma": [3.0, 2.0, 4.0],
    "rho": [20.0, 0.5, 15.0],
    "gamma": [0.99, 0.98, 1.0],
    "lr": 0.7,
    "weight_decay": 0.01,
    "consensus_decay": 0.02,
}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def backward(model: nn.Module, k: int, part: int) -> None:
    """Compute the gradient of a part of the data; parts differ."""
    generator = torch.Generator().manual_seed(k)
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 6, generator=generator).to(dtype) + part
    y = (part + 1) * torch.randn(8, 3, generator=generator).to(dtype)
    for param in model.parameters():
        param.grad = None
    nn.functional.mse_loss(model(x), y).backward()


def compared(model: nn.Module, opt: Any, rounds: int, **tolerance: float) -> list[dict[str, float]]:
    """Train, and compare every row with its definition."""
    rows: list[dict[str, float]] = []
    with Diagnostics(opt, every=1, callback=rows.append):
        for k in range(rounds):
            old = literal.copied(opt)
            for part in range(opt.batches):
                backward(model, k * opt.batches + part, part)
                opt.step()
            expected = literal.row(opt, old, literal.copied(opt))
            assert {**rows[-1], "absent": 0} == pytest.approx(
                {**expected, "absent": 0}, **tolerance
            )
    assert [row["iteration"] for row in rows] == list(range(1, rounds + 1))
    return rows


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"dual_decay": 0.9},
        {"clip": 5.0},
        {"scheme": "adagrad", "eta": 0.3, "eps": 1e-3},
        {"batches": 1, "weights": None, "sigma": 2.0, "rho": 10.0, "gamma": 0.99},
    ],
    ids=str,
)
def test_sisa_by_definition(more: dict[str, Any]) -> None:
    model = network()
    groups = [
        {"params": model[0].parameters(), "lr": 0.3},
        {"params": model[2].parameters(), "weight_decay": 0.1},
    ]
    opt = SISA(groups, **{**HETEROGENEOUS, **more})
    rows = compared(model, opt, 8, rel=1e-9)
    assert 0 < rows[-1]["sigma_share"] < 1
    assert rows[-1]["step_min"] < rows[-1]["step_max"]
    assert ("spread" in rows[-1]) == (opt.batches > 1)


@pytest.mark.parametrize("dual_decay", [1.0, 0.25])
def test_nsisa_by_definition(dual_decay: float) -> None:
    """Q is found in what the duals did, without orthogonalising anything."""
    model = network()
    more = {"sisa_sigma": 2.0, "sisa_rho": 10.0, "ns_dtype": None, "dual_decay": dual_decay}
    opt = NSISA(model.parameters(), **{**HETEROGENEOUS, "sigma": 8.0, **more})
    compared(model, opt, 8, rel=1e-6)


def test_pisa_by_definition() -> None:
    model = network()
    compared(model, PISA(model.parameters(), **HETEROGENEOUS), 5, rel=1e-9)


def test_half_precision_by_definition() -> None:
    model = network(torch.bfloat16)
    opt = SISA(model.parameters(), **HETEROGENEOUS, state_dtype=torch.bfloat16)
    compared(model, opt, 5, rel=1e-6)


def test_own_preconditioners() -> None:
    class Known(SecondMoment):
        pass

    class Unknown(Preconditioner):
        def solve(self, problem: Any, state: Any) -> Any:
            return -problem.residual / problem.sigma, {}

    class Wrong(Unknown):
        def diagonal(self, dual: Any, state: Any, step: Any) -> Any:
            return dual[:1]

    model = network()
    rows = compared(model, PISA(model.parameters(), Known("rmsprop"), **HETEROGENEOUS), 3, rel=1e-9)
    assert "momentum_median" in rows[-1]
    rows = compared(model, PISA(model.parameters(), Unknown(), **HETEROGENEOUS), 3, rel=1e-9)
    assert not {"momentum_median", "first_step_min", "sigma_share"} & set(rows[-1])
    assert "step_median" in rows[-1]
    with pytest.raises(ValueError, match=r"diagonal must have the shape .* from Wrong"):
        compared(model, PISA(model.parameters(), Wrong(), sigma=2.0), 2)


def test_parameters_that_are_partly_orthogonalised_count_together() -> None:
    model = network()
    opt = NSISA(model.parameters(), ns_dtype=None, sigma=50.0, sisa_sigma=0.5)
    (row,) = compared(model, opt, 1, rel=1e-6)
    assert row["step_min"] == pytest.approx(1 / 50)
    assert row["step_max"] == pytest.approx(2.0)


# Estimates


def test_estimates_are_close() -> None:
    """Rows and columns of very different size, two tensors of which little is seen."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 0, 700)[:, None] * torch.linspace(0.5, 2, 768)
    params = [nn.Parameter(scale.clone()), nn.Parameter(scale[:, :512].t().clone())]
    opt = SISA([*params, nn.Parameter(torch.ones(3))], batches=2, sigma=[1.0, 2.0], rho=30.0)
    with Diagnostics(opt, every=1) as watch:
        for _ in range(3):
            old = literal.copied(opt)
            for part in range(2):
                for param in params:
                    noise = torch.randn(param.shape, generator=generator)
                    param.grad = param.detach() * (noise + part)
                opt.step()
        assert watch._layout is not None
        assert sum(s.scale.numel() for s in watch._layout.sections) < 2**16 + 200
        expected = literal.row(opt, old, literal.copied(opt))
        row = watch.latest
        assert row.pop("absent") == 0
        assert row == pytest.approx({**expected, **ends(row)}, rel=0.05, abs=0.01)
        for name in ("first_step", "momentum"):  # no sample has the very ends
            assert row[f"{name}_min"] >= expected[f"{name}_min"] * (1 - 1e-6)
            assert row[f"{name}_max"] <= expected[f"{name}_max"] * (1 + 1e-6)


def ends(row: dict[str, float]) -> dict[str, float]:
    names = [f"{name}_{end}" for name in ("first_step", "momentum") for end in ("min", "max")]
    return {name: row[name] for name in names}


# Extremes


@pytest.mark.parametrize(
    ("signs", "expected"), [((1, 1, 1), 0.0), ((1, -1), 1.0), ((1, 0), 0.5**0.5)]
)
def test_spread_is_between_nothing_and_one(signs: tuple[int, ...], expected: float) -> None:
    param = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    opt = PISA([param], batches=len(signs))
    gradient = torch.randn(50, dtype=torch.float64)
    with Diagnostics(opt, every=1) as watch:
        for sign in signs:
            param.grad = sign * gradient
            opt.step()
        assert watch.latest["spread"] == pytest.approx(expected, abs=1e-12)


def test_zeros_and_nothing() -> None:
    """No movement is no residual, and lr = 0 no division."""
    param = nn.Parameter(torch.zeros(5))
    opt = SISA([param], batches=2, lr=0.0)
    with Diagnostics(opt, every=1) as watch:
        for gradient in (0.0, 1.0):
            for _ in range(2):
                param.grad = torch.full_like(param, gradient)
                opt.step()
            row = watch.latest
            for name in ("primal_residual", "primal_relative", "dual_residual", "dual_relative"):
                assert row[name] == 0, name
            assert row["spread"] == pytest.approx(0, abs=1e-7)
            assert row["step_max"] == row["first_step_max"] == 0
    assert row["dual_norm"] > 0


def test_divergence_shows() -> None:
    param = nn.Parameter(torch.ones(5))
    opt = SISA([param], nonfinite="ignore")
    with Diagnostics(opt, every=1) as watch:
        param.grad = torch.full_like(param, torch.nan)
        opt.step()
        assert watch.latest["dual_norm"] != watch.latest["dual_norm"]


def test_without_duals_there_is_no_primal_residual() -> None:
    param = nn.Parameter(torch.ones(5))
    opt = SISA([param], dual_decay=0.0)
    with Diagnostics(opt, every=1) as watch:
        param.grad = torch.ones(5)
        opt.step()
        assert "primal_residual" not in watch.latest
        assert watch.latest["dual_norm"] == 0
        assert watch.latest["momentum_median"] > 0


# Every optimizer, unusual parameters


def unusual(entry: Entry) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    params = [
        nn.Parameter(torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(7, 5).t()),
        nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0, 2)),
        nn.Parameter(torch.randn(11, dtype=torch.float64)),
        nn.Parameter(torch.randn(9).bfloat16()),
        nn.Parameter(torch.randn(4), requires_grad=False),
        nn.Parameter(torch.randn(4)),  # never has a gradient
    ]
    return params, entry(params)


@each
def test_unusual_parameters(entry: Entry) -> None:
    params, opt = unusual(entry)
    rows: list[dict[str, float]] = []
    with Diagnostics(opt, every=1, callback=rows.append):
        for k in range(4):
            old = literal.copied(opt)
            for part in range(opt.batches):
                for number, param in enumerate(params[:7]):
                    late = number == 1 and (k == 0 or part == 1)
                    target = torch.full_like(param, number + 2 * part)
                    param.grad = None if late else param.detach() - target
                opt.step()
            expected = literal.row(opt, old, literal.copied(opt))
            expected = {name: value for name, value in expected.items() if "median" not in name}
            assert rows[-1].pop("absent") == 0
            medians = {name: value for name, value in rows[-1].items() if "median" in name}
            assert rows[-1] == pytest.approx({**expected, **medians}, rel=2e-3, abs=1e-5)


@each
def test_training_does_not_notice(entry: Entry) -> None:
    results = []
    for watched in (False, True):
        params, opt = unusual(entry)
        watch = Diagnostics(opt, every=1) if watched else None
        torch.manual_seed(1)
        for _ in range(3 * opt.batches):
            for param in params[:7]:
                param.grad = torch.randn_like(param)
            opt.step()
        results.append(([param.detach().clone() for param in params], torch.get_rng_state()))
        assert watch is None or watch.latest["iteration"] == 3
    (plain, state), (seen, other_state) = results
    assert torch.equal(state, other_state)
    for one, two in zip(plain, seen, strict=True):
        assert torch.equal(one, two)
