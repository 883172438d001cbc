"""MISA with stages before the orthogonalisation: formulas, paths, state and what is refused."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.preconditioners.test_consensus import gradients, literally
from torchpisa import MISA
from torchpisa.algorithms.nsisa import newton_schulz
from torchpisa.kernels import misa as kernels
from torchpisa.kernels.job import Member
from torchpisa.kernels.misa import ConsensusJob
from torchpisa.preconditioners.consensus import EigenbasisMoment, Stage, Whiten

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
STAGES = [
    Whiten(every=3),
    Whiten(power=0.5, every=4, beta=0.8),
    EigenbasisMoment(every=3),
    EigenbasisMoment("both", every=2, beta=0.8),
]
over_stages = pytest.mark.parametrize("stage", STAGES, ids=repr)
over_paths = pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])


@over_stages
@over_paths
@pytest.mark.parametrize("tall", [False, True], ids=["wide", "tall"])
def test_is_the_formula(stage: Stage, foreach: bool, tall: bool) -> None:
    """U from the duals of two batches, the stage, Newton-Schulz, and the step."""
    gs = gradients(18, 4, 7).unflatten(0, (9, 2))
    mu, c, lr, shares = 0.8, 1.7, 0.05, torch.tensor([1 / 4, 3 / 4], **DOUBLE)
    summed = torch.einsum("tbij,b->tij", gs, shares)
    dual, us = torch.zeros(4, 7, **DOUBLE), []
    for g in summed:
        delta = -(1 - mu) * (dual + g)
        us.append(dual + c * delta)
        dual = dual + delta
    steps = literally(stage, torch.stack(us), summed)
    expected = sum(lr * 0.2 * 7**0.5 * newton_schulz(step) for step in steps)
    w = nn.Parameter(torch.zeros(7, 4, **DOUBLE) if tall else torch.zeros(4, 7, **DOUBLE))
    opt = MISA(
        [w],
        lr=lr,
        **{"momentum": mu, "look_ahead": c, "row_beta": None, "before": stage},
        **{"batches": 2, "weights": [1, 3], "foreach": foreach},
        weight_decay=0.0,
    )
    for of_round in gs:
        for g in of_round:
            w.grad = g.T.contiguous() if tall else g
            opt.step()
    torch.testing.assert_close(w.detach().T if tall else w.detach(), expected, rtol=1e-6, atol=1e-8)


@over_paths
def test_damping_is_the_formula(foreach: bool) -> None:
    """A singular value s becomes s / sqrt(s^2 + tau^2), up to what five iterations leave."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.linalg.qr(torch.randn(n, n, generator=generator, **DOUBLE)).Q for n in (6, 9)]
    values = torch.tensor([3.0, 2.0, 1.0, 0.5, 0.1, 0.01], **DOUBLE)
    g = vectors[0] @ torch.diag(values) @ vectors[1][:6]
    steps = {}
    for damping in (0.0, 0.5):
        w = nn.Parameter(torch.zeros(6, 9, **DOUBLE))
        settings = {"momentum": 0.0, "look_ahead": 1.0, "row_beta": None, "weight_decay": 0.0}
        opt = MISA([w], 1.0, **settings, damping=damping, foreach=foreach, ns_steps=20)
        w.grad = g
        opt.step()
        steps[damping] = -vectors[0].T @ w.detach() @ vectors[1][:6].T / (0.2 * 3)
    tau = 0.5 * (values.square().mean()).sqrt()
    # The quintic iteration leaves singular values of one between 0.68 and 1.21, and these enter
    # with the same factor for a whole matrix and its blocks.
    damped = steps[0.5].diagonal()
    sharp = values / (values.square() + tau**2).sqrt()
    assert ((damped / sharp - 0.95).abs() < 0.28).all()
    assert steps[0.0].diagonal().min() > 0.67
    assert damped[-1] < 0.02


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 9), (9, 6), (6, 9), (5, 5), (8, 3, 2, 2), (4,)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(opt: MISA, params: list[nn.Parameter], first: int, last: int) -> None:
    """Step with gradients that depend on the number of the step; some have none."""
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = None if (t + i) % 7 == 3 else grad
        opt.step()


@over_stages
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("damping", [0.0, 0.2])
def test_foreach_equals_the_loop(stage: Stage, dtype: torch.dtype, damping: float) -> None:
    trained = []
    for foreach in (False, True):
        params = parameters(dtype)
        opt = MISA(params, before=stage, damping=damping, foreach=foreach, ns_dtype=None)
        train(opt, params, 0, 20)
        trained.append([param.detach() for param in params])
    # Eigenvectors whose eigenvalues are close multiply rounding errors; float64 shows the rest.
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
    for loop, foreach_ in zip(*trained, strict=True):
        torch.testing.assert_close(foreach_, loop, rtol=tolerance, atol=tolerance)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "before": st.sampled_from([None, *STAGES]),
            "damping": st.sampled_from([0.0, 0.2]),
            "blocks": st.sampled_from([1, 2]),
            "row_beta": st.sampled_from([None, 0.0, 0.95]),
            "batches": st.sampled_from([1, 2]),
            "look_ahead": st.sampled_from([1.0, 1.9, 2.0]),
            "weight_decay": st.sampled_from([0.0, 0.3]),
            "clip": st.sampled_from([None, 0.5]),
            "maximize": st.booleans(),
            "capturable": st.booleans(),
            "nonfinite": st.sampled_from(["raise", "skip", "ignore"]),
        }
    )
)
def test_what_combines_equals_the_loop(own: dict[str, Any]) -> None:
    """All settings go together."""
    # Rows that two blocks divide, and a stack of two matrices.
    shapes = [(6, 9), (8, 6), (6, 9), (4, 4), (2, 5, 4), (4,)]
    trained = []
    for foreach in (False, True):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=generator, **DOUBLE)) for s in shapes]
        opt = MISA(params, lr=0.01, foreach=foreach, **own)
        train(opt, params, 0, 8)
        opt.flush()
        trained.append([param.detach() for param in params])
    for loop, together in zip(*trained, strict=True):
        assert loop.isfinite().all()
        torch.testing.assert_close(together, loop, rtol=1e-9, atol=1e-9)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for most in (2**28, 1):
        monkeypatch.setattr("torchpisa.kernels.newton_schulz.CHUNK_BYTES", most)
        params = parameters(torch.float64)
        train(MISA(params, before=EigenbasisMoment()), params, 0, 8)
        trained.append([param.detach() for param in params])
    for together, alone in zip(*trained, strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-12)


def by_state_dict(opt: MISA, make: Callable[[], MISA]) -> MISA:
    saved = pickle.loads(pickle.dumps(opt.state_dict()))
    assert all("before" not in group for group in saved["param_groups"])
    other = make()
    other.load_state_dict(saved)
    return other


@over_stages
@over_paths
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_goes_on_bit_for_bit_in_the_middle_of_a_round(
    stage: Stage, foreach: bool, how: str
) -> None:
    settings: dict[str, Any] = {"before": stage, "damping": 0.1, "batches": 2, "foreach": foreach}
    params = parameters()
    opt = MISA(params, **settings)
    train(opt, params, 0, 9)
    if how == "state_dict":
        others = [nn.Parameter(param.detach().clone()) for param in params]
        other = by_state_dict(opt, lambda: MISA(others, **settings))
    else:
        other = pickle.loads(pickle.dumps(opt)) if how == "pickle" else copy.deepcopy(opt)
        others = other.param_groups[0]["params"]
    assert other.param_groups[0]["before"] == stage
    train(opt, params, 9, 20)
    train(other, others, 9, 20)
    for param, resumed in zip(params, others, strict=True):
        assert torch.equal(param, resumed)


@over_stages
def test_state_keeps_its_dtypes_in_a_model_of_another(stage: Stage) -> None:
    params = parameters()
    opt = MISA(params, before=stage)
    train(opt, params, 0, 3)
    dtypes = {key: value.dtype for key, value in opt.state[params[0]].items()}
    for param in params:
        param.data = param.data.double()
        param.grad = None
    opt.load_state_dict(opt.state_dict())
    assert {key: value.dtype for key, value in opt.state[params[0]].items()} == dtypes
    train(opt, params, 3, 4)


def test_a_state_of_another_stage_is_refused() -> None:
    params = parameters()
    opt = MISA(params, before=Whiten())
    train(opt, params, 0, 2)
    with pytest.raises(ValueError, match=r"state_dict must have basis, dual, gram, rows, squares"):
        MISA(params, before=EigenbasisMoment()).load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match=r"state_dict must have dual, rows, step"):
        MISA(params).load_state_dict(opt.state_dict())


def test_groups_may_differ() -> None:
    a, b, c = (nn.Parameter(torch.randn(4, 6)) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b], "before": None}]
    opt = MISA(groups, before=Whiten())
    opt.add_param_group({"params": [c], "before": EigenbasisMoment(), "damping": 1})
    for param in (a, b, c):
        param.grad = torch.randn(4, 6)
    opt.step()
    assert {"gram", "root"} <= opt.state[a].keys()
    assert opt.state[b].keys() == {"dual", "rows", "step"}
    assert {"gram", "basis", "squares"} <= opt.state[c].keys()
    assert opt.param_groups[2]["damping"] == 1.0
    assert opt.state[a]["root"].dtype == torch.bfloat16


def test_only_orthogonalised_matrices_have_a_stage() -> None:
    matrix, table, vector = (nn.Parameter(torch.randn(s)) for s in [(8, 4), (9, 4), (5,)])
    groups = [{"params": [matrix, vector]}, {"params": [table], "matrix": False}]
    opt = MISA(groups, before=EigenbasisMoment("both"))
    assert "basis" in opt.state[matrix]
    assert opt.state[vector].keys() == opt.state[table].keys() == {"dual", "moment", "step"}


@over_stages
def test_a_step_that_is_not_kept_changes_nothing(stage: Stage) -> None:
    """On a GPU a batch may turn out absent when nobody can wait for it."""
    w = nn.Parameter(torch.randn(4, 6))
    opt = MISA([w], before=stage)
    w.grad = torch.randn(4, 6)
    opt.step()
    before = copy.deepcopy(dict(opt.state[w])), w.detach().clone()

    def take(keep: bool) -> None:
        member = Member(w, None, opt.state[w])
        job = ([member], [torch.randn(4, 6)], True, opt.param_groups[0], 0.1, 0.0, 0)
        with torch.no_grad():
            kernels.LOOP.consensus_step(ConsensusJob(*job, torch.tensor(keep)))

    take(False)
    for name, value in before[0].items():
        assert torch.equal(opt.state[w][name], value), name
    assert torch.equal(w.detach(), before[1])
    take(True)
    for name, value in before[0].items():
        assert not torch.equal(opt.state[w][name], value), name


@over_stages
def test_bytes_of_state_with_state_dtype(stage: Stage) -> None:
    w = nn.Parameter(torch.randn(4, 6))
    opt = MISA([w], before=stage, state_dtype=torch.bfloat16, stochastic_rounding=True)
    for _ in range(6):
        w.grad = torch.randn(4, 6)
        opt.step()
    assert w.isfinite().all()
    wide = {"gram"} if isinstance(stage, Whiten) else set()  # indefinite if it were rounded
    for name in stage.names:
        assert opt.state[w][name].dtype == (torch.float32 if name in wide else torch.bfloat16)


@dataclass(frozen=True)
class Counter(Stage):
    """A stage of one's own, which counts rounds under the name that it is given."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def init_state(self, n: int, k: int, like: Tensor) -> dict[str, Tensor]:
        return {self.name: like.new_zeros(1)}

    def apply(self, u: Tensor, g: Tensor, state: Any, round: int) -> tuple[Tensor, dict[str, Any]]:
        return u, {self.name: state[self.name] + 1}


def test_names_of_state_that_are_taken() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    opt = MISA([param], before=Counter("rounds"))
    for _ in range(3):
        param.grad = torch.ones(3, 2)
        opt.step()
    assert opt.state[param]["rounds"].item() == 3
    for name in ("dual", "moment", "pending", "rows", "step", "", "gram.0"):
        with pytest.raises(ValueError, match=rf"names of Counter .* reserved, got '{name}'"):
            MISA([param], before=Counter(name))


def test_what_is_refused() -> None:
    w = nn.Parameter(torch.randn(4, 6))
    with pytest.raises(ValueError, match=r"before must be None or a stage of .*, got <class"):
        MISA([w], before=Whiten)  # type: ignore[arg-type]


@pytest.mark.parametrize("changed", [{"blocks": 2}, {"before": EigenbasisMoment()}], ids=str)
def test_what_state_is_for_cannot_be_changed(changed: dict[str, Any]) -> None:
    w = nn.Parameter(torch.randn(4, 6))
    opt = MISA([w], before=Whiten())
    opt.param_groups[0].update(changed)
    before, w.grad = w.detach().clone(), torch.ones_like(w)
    with pytest.raises(ValueError, match=r"before and blocks must stay what they were .*, got"):
        opt.step()
    assert torch.equal(w, before)


@over_stages
@over_paths
@pytest.mark.parametrize(
    ("shape", "block", "blocks"),
    [
        ((12, 5), (4, 5), 3),
        ((12, 20), (6, 20), 2),
        ((12, 4), (6, 4), 2),
        ((3, 4, 9), (4, 9), 3),
        ((2, 9, 2, 2), (9, 4), 2),
    ],
    ids=str,
)
def test_blocks_have_stages_of_their_own(
    shape: tuple[int, ...], block: tuple[int, int], blocks: int, foreach: bool, stage: Stage
) -> None:
    """Rows of queries, keys and values; stacks of experts' matrices or kernels."""
    own: dict[str, Any] = {"before": stage, "damping": 0.1, "foreach": foreach}
    generator = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(shape, generator=generator, **DOUBLE))
    parts = [nn.Parameter(part.clone()) for part in whole.detach().reshape(blocks, *block)]
    opt, apart = MISA([whole], blocks=blocks, **own), MISA(parts, **own)
    for _ in range(6):
        whole.grad = torch.randn(shape, generator=generator, **DOUBLE)
        for part, grad in zip(parts, whole.grad.reshape(blocks, *block), strict=True):
            part.grad = grad.clone()
        opt.step()
        apart.step()
    ends = torch.stack([part.detach() for part in parts]).reshape(shape)
    torch.testing.assert_close(whole.detach(), ends, rtol=1e-9, atol=1e-10)
    for name in stage.names:
        below = torch.cat([apart.state[part][name] for part in parts])
        torch.testing.assert_close(opt.state[whole][name], below, rtol=1e-7, atol=1e-9)


def test_the_scale_of_the_loss_does_not_matter() -> None:
    """All of P forgets it, so steps are the same."""
    for stage in STAGES:
        steps: list[Tensor] = []
        for scale in (1.0, 1e6):
            w = nn.Parameter(torch.zeros(4, 7, **DOUBLE))
            opt = MISA([w], before=stage, damping=0.1, eps=0.0)
            for g in gradients(9, 4, 7):
                w.grad = scale * g
                opt.step()
            steps.append(w.detach())
        torch.testing.assert_close(*steps, rtol=1e-7, atol=1e-10)
