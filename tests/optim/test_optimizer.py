"""The promises of torch.optim, kept by every optimizer of the table."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, NSISA, SISA

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6, 5), nn.Linear(5, 3)
    ).to(dtype)


def batch(k, dtype=torch.float32):
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(8, 2, 8, generator=generator).to(dtype)
    return x, torch.randint(0, 3, (8,), generator=generator)


def train(model, opt, steps, start=0, scheduler=None):
    for k in range(start, start + steps):
        x, y = batch(k % 12, next(model.parameters()).dtype)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        opt.step()
        if scheduler is not None:
            scheduler.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss(model):
    with torch.no_grad():
        pairs = [batch(k, next(model.parameters()).dtype) for k in range(12)]
        return sum(nn.functional.cross_entropy(model(x).float(), y).item() for x, y in pairs) / 12


@each
def test_loss_goes_down(entry):
    model = network()
    before = loss(model)
    train(model, entry(model.parameters()), 120)
    assert loss(model) < before - 0.05


@each
def test_closure(entry):
    """A closure, as Lightning uses it, gives the same as calling backward before step."""
    one, two = network(), network()
    train(one, entry(one.parameters()), 12)
    opt = entry(two.parameters())
    for k in range(12):
        x, y = batch(k)

        def closure(x=x, y=y):
            assert torch.is_grad_enabled()
            opt.zero_grad()
            value = nn.functional.cross_entropy(two(x), y)
            value.backward()
            return value

        returned = opt.step(closure)
        assert returned.requires_grad
    assert torch.equal(weights(one), weights(two))


@each
def test_step_without_closure_returns_none(entry):
    p = nn.Parameter(torch.ones(2, 2))
    opt = entry([p])
    p.grad = torch.ones(2, 2)
    assert opt.step() is None


@each
@pytest.mark.parametrize("cut", [12, 17])
def test_resume_is_bit_equal_also_in_mid_round(entry, cut):
    model = network()
    opt = entry(model.parameters())
    train(model, opt, cut)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    train(model, opt, 11, start=cut)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = network()
    other = entry.without_initial_consensus(resumed.parameters())
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    assert (other.iteration, other.batch) == (cut // opt.batches, cut % opt.batches)
    train(resumed, other, 11, start=cut)
    assert torch.equal(weights(model), weights(resumed))
    assert (opt.iteration, opt.batch, opt.synced) == (other.iteration, other.batch, other.synced)


def test_settings_that_are_tensors_are_saved():
    model = network()
    a = SISA(model.parameters(), capturable=True, nonfinite="skip", batches=2, lr=torch.tensor(0.5))
    train(model, a, 1)
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    b = SISA(model.parameters(), sigma=7.0, rho=3.0, capturable=True, batches=2)
    b.load_state_dict(torch.load(file, weights_only=True))
    own, saved = b.param_groups[0], a.param_groups[0]
    assert own["lr"] == 0.5
    assert b.round.kept.tolist() == [True, False]
    assert (own["sigma"], own["rho"]) == (saved["sigma"], saved["rho"])


@each
def test_loading_does_not_tie_two_optimizers_together(entry):
    one, two = network(), network()
    a, b = entry(one.parameters()), entry(two.parameters())
    train(one, a, 5)
    b.load_state_dict(a.state_dict())
    before = copy.deepcopy(b.state_dict()["state"])
    train(one, a, 3)
    after = b.state_dict()["state"]
    for key, state in before.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(after[key][name]), torch.as_tensor(value))


@each
def test_deepcopy_and_pickle(entry):
    model = network()
    opt = entry(model.parameters())
    train(model, opt, 7)
    copies = []
    for model2, opt2 in (copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))):
        assert (opt2.iteration, opt2.batch) == (opt.iteration, opt.batch)
        train(model2, opt2, 9, start=7)
        copies.append(weights(model2))
    train(model, opt, 9, start=7)
    assert all(torch.equal(weights(model), copied) for copied in copies)


@each
def test_state_dtype_is_kept_on_load(entry):
    model = network(torch.bfloat16)
    opt = entry(model.parameters())
    train(model, opt, 6)
    other = entry.without_initial_consensus(model.parameters())
    other.load_state_dict(opt.state_dict())
    for p in model.parameters():
        (dual, *_) = (key for key in opt.state[p] if key.startswith("dual"))
        assert other.state[p][dual].dtype == torch.float32
        assert torch.equal(other.state[p][dual], opt.state[p][dual])


@each
def test_state_dtype(entry):
    model = network()
    opt = entry(model.parameters(), state_dtype=torch.bfloat16)
    before = loss(model)
    train(model, opt, 60)
    assert loss(model) < before
    for state in opt.state.values():
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        tensors.pop("gram", None)  # of a stage: rounding could make it indefinite
        assert {v.dtype for v in tensors.values() if v.dim()} == {torch.bfloat16}


@each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_parameter_dtypes(entry, dtype):
    """Other precisions follow the float32 run up to the rounding of the coarser one."""
    model, reference = network(dtype), network()
    train(model, entry(model.parameters()), 6)
    train(reference, entry(reference.parameters()), 6)
    moved = (weights(reference) - weights(network())).norm()
    # Half-precision gradients are off by percents, and Newton-Schulz and SISA's first steps see
    # little more than their signs; float64 has no such excuse.
    tolerance = 1e-3 * moved if dtype == torch.float64 else 0.2 * moved + 0.02
    assert (weights(model).float() - weights(reference)).norm() < tolerance
    assert {p.dtype for p in model.parameters()} == {dtype}


def odd_parameters():
    torch.manual_seed(0)
    wide = torch.randn(6, 8)
    return [
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(0)),
        nn.Parameter(torch.randn(3, 0)),
        nn.Parameter(torch.randn(4, dtype=torch.complex64)),
        nn.Parameter(torch.randn(3, 5, dtype=torch.complex64)),
        nn.Parameter(wide[:, ::2]),
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(3, dtype=torch.float64)),
        nn.Parameter(torch.randn(1, 7)),
        nn.Parameter(torch.randn(7, 1)),
    ]


@each
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_odd_shapes(entry, foreach):
    params = odd_parameters()
    before = [(p.detach().clone(), p.stride()) for p in params]
    opt = entry.without_initial_consensus(params, foreach=foreach, weight_decay=0.0)
    for k in range(6):
        opt.zero_grad()
        sum(((p - 3).abs() ** 2).sum() for p in params if p.numel()).float().backward()
        for p in params:
            if not p.numel():
                p.grad = torch.zeros_like(p)
        opt.step()
        assert k < 5 or opt.synced
    for p, (q, stride) in zip(params, before, strict=True):
        assert torch.isfinite(p).all()
        assert p.stride() == stride
        if p.numel():
            assert (p - 3).abs().pow(2).sum() < (q - 3).abs().pow(2).sum()


@each
def test_complex_equals_its_real_view(entry):
    if entry.make in (NSISA, MISA):
        pytest.skip("a real matrix is orthogonalised, a complex one takes SISA's rule")
    z = nn.Parameter(torch.randn(5, dtype=torch.complex128))
    x = nn.Parameter(torch.view_as_real(z.detach()).clone())
    a, b = entry([z]), entry([x])
    for k in range(12):
        g = torch.randn(5, dtype=torch.complex128, generator=torch.Generator().manual_seed(k))
        z.grad, x.grad = g, torch.view_as_real(g)
        a.step()
        b.step()
    torch.testing.assert_close(torch.view_as_real(z.detach()), x.detach(), rtol=1e-12, atol=1e-12)


@each
def test_conjugate_gradients_are_resolved(entry):
    z, y = (nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2))
    g = torch.randn(3, dtype=torch.complex64)
    a, b = entry([z]), entry([y])
    for _ in range(a.batches):
        z.grad, y.grad = g.conj(), g.conj().resolve_conj()
        a.step()
        b.step()
    assert torch.equal(z.detach(), y.detach())


@each
@pytest.mark.parametrize("foreach", [None, False])
def test_a_step_under_autocast_is_the_same(entry, foreach):
    """Autocast would take the products of matrices in bfloat16."""
    model, other = network(), network()
    a, b = (entry(m.parameters(), foreach=foreach) for m in (model, other))
    for k in range(6):
        train(model, a, 1, start=k)
        x, y = batch(k)
        b.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        with torch.autocast("cpu", torch.bfloat16):
            b.step()
    with torch.autocast("cpu", torch.bfloat16):
        b.flush()
    a.flush()
    assert torch.equal(weights(model), weights(other))


@each
def test_no_gradients_at_all(entry):
    p = nn.Parameter(torch.ones(3, 3))
    opt = entry.without_initial_consensus([p])
    for _ in range(2 * opt.batches):
        opt.step()
    assert torch.equal(p.detach(), torch.ones(3, 3))
    assert opt.iteration == 2


@each
def test_maximize(entry):
    a, b = (nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3)) for _ in range(2))
    up, down = entry([a], maximize=True), entry([b])
    for k in range(8):
        g = torch.randn(2, 3, generator=torch.Generator().manual_seed(k))
        a.grad, b.grad = -g, g
        up.step()
        down.step()
    torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-6, atol=1e-7)


@each
@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_a_schedule_is_the_lr_of_each_step(entry, tensor):
    """A scheduler, with a float or a tensor lr, does what writing lr into the groups does."""
    models = [network(torch.float64), network(torch.float64)]
    make = entry.without_initial_consensus
    opts = [make(model.parameters()) for model in models]
    base = opts[0].defaults["lr"]
    if tensor:
        opts[0] = make(models[0].parameters(), lr=torch.tensor(base, dtype=torch.float64))
    scheduler = torch.optim.lr_scheduler.LambdaLR(opts[0], lambda k: 0.1 * k)
    for k in range(12):
        for group in opts[1].param_groups:
            group["lr"] = base * 0.1 * k
        train(models[0], opts[0], 1, start=k, scheduler=scheduler)
        train(models[1], opts[1], 1, start=k)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-8, atol=1e-10)
    constant = network(torch.float64)
    train(constant, make(constant.parameters()), 12)
    assert not torch.allclose(weights(models[0]), weights(constant))


@each
@pytest.mark.parametrize(
    "make",
    [
        lambda opt, lr, own: torch.optim.lr_scheduler.OneCycleLR(
            opt, 2 * lr, total_steps=20, cycle_momentum=own
        ),
        lambda opt, lr, own: torch.optim.lr_scheduler.CyclicLR(
            opt, 0.1 * lr, lr, step_size_up=3, cycle_momentum=own
        ),
    ],
    ids=["onecycle", "cyclic"],
)
def test_schedulers_that_cycle_momentum(entry, make):
    """They write lr and, where there is one, momentum; both must stay what the step can take."""
    model = network()
    opt = entry(model.parameters())
    has_momentum = isinstance(opt.defaults.get("momentum"), float)
    train(model, opt, 12, scheduler=make(opt, opt.defaults["lr"], has_momentum))
    assert torch.isfinite(weights(model)).all()
    assert not torch.equal(weights(model), weights(network()))


@each
@pytest.mark.parametrize("foreach", [None, False])
def test_rates_from_an_array(entry, foreach):
    numpy = pytest.importorskip("numpy")
    model, other = network(), network()
    a, b = (entry(m.parameters(), foreach=foreach) for m in (model, other))
    for k, lr in enumerate(numpy.linspace(0, 0.01, 6, dtype=numpy.float32)):
        a.param_groups[0]["lr"], b.param_groups[0]["lr"] = lr, float(lr)
        train(model, a, 1, start=k), train(other, b, 1, start=k)
    assert torch.equal(weights(model), weights(other))


def test_reduce_on_plateau():
    model = network()
    opt = SISA(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)
    scheduler.step(1.0)
    scheduler.step(2.0)
    assert opt.param_groups[0]["lr"] == 0.25


@each
def test_parameter_groups_have_settings_of_their_own(entry):
    a, b = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    opt = entry.without_initial_consensus([{"params": [a], "lr": 0.0}, {"params": [b]}])
    for _ in range(opt.batches):
        a.grad = b.grad = torch.ones(3, 3)
        opt.step()
    assert torch.equal(a.detach(), torch.ones(3, 3))
    assert not torch.equal(b.detach(), torch.ones(3, 3))


def test_sigma_rho_gamma_per_group():
    """Two groups with different settings equal two optimizers."""
    settings = [
        {"sigma": [1.0, 2.0], "rho": 3.0, "gamma": 0.9},
        {"sigma": 4.0, "rho": [0.0, 5.0], "gamma": lambda iteration: 0.8 + 0.01 * iteration},
    ]
    together = [nn.Parameter(torch.ones(4)) for _ in settings]
    apart = [nn.Parameter(torch.ones(4)) for _ in settings]
    one = SISA([{"params": [p], **s} for p, s in zip(together, settings, strict=True)], batches=2)
    two = [SISA([p], batches=2, **s) for p, s in zip(apart, settings, strict=True)]
    for k in range(20):
        for p in (*together, *apart):
            p.grad = torch.randn(4, generator=torch.Generator().manual_seed(k)) + p.detach()
        one.step()
        for opt in two:
            opt.step()
    for p, q in zip(together, apart, strict=True):
        assert torch.equal(p.detach(), q.detach())


@each
def test_add_param_group_in_mid_round(entry):
    a, b = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    opt = entry.without_initial_consensus([a])
    for _ in range(opt.batches + opt.batches // 2):
        a.grad = torch.ones(2, 2)
        opt.step()
    opt.add_param_group({"params": [b]})
    position = opt.batch
    assert opt.iteration == 1
    assert all(g["iteration"] == 1 for g in opt.state_dict()["param_groups"])
    while opt.iteration < 2:
        a.grad = b.grad = torch.ones(2, 2)
        opt.step()
    assert opt.synced
    assert not torch.equal(b.detach(), torch.ones(2, 2))
    assert position == opt.batches // 2


def larger(opt, model):
    """Parameters with more rows and no state, as Gaussian splatting adds points."""
    params = opt.param_groups[0]["params"]
    model[3] = nn.Linear(4 * 6, 9)
    model[4] = nn.Linear(9, 3)
    params[2:] = [*model[3].parameters(), *model[4].parameters()]


def fewer(opt, model):
    opt.param_groups[0]["params"] = [p for p in model.parameters() if p is not model[4].weight]


@pytest.mark.parametrize("change", [larger, fewer])
@pytest.mark.parametrize("cls", [SISA, NSISA, MISA])
def test_lists_of_parameters_may_change(cls, change):
    """As in torch.optim, a step is one of the parameters that are in the groups then."""
    model = network()
    opt = cls(model.parameters())
    train(model, opt, 2)
    change(opt, model)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, 2)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old) == all(p is not each for each in opt.param_groups[0]["params"])


@each
def test_named_parameters(entry):
    """They give the same run, and keep their names."""
    plain, named = network(), network()
    train(plain, entry(plain.parameters()), 6)
    opt = entry(named.named_parameters())
    train(named, opt, 6)
    assert torch.equal(weights(plain), weights(named))
    names = [name for group in opt.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in named.named_parameters())


def test_named_parameters_are_named_in_errors():
    model = network()
    opt = SISA(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    next(model.parameters()).grad[0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"0\.weight"):
        opt.step()


@each
def test_frozen_and_thawed_parameters(entry):
    model = network()
    model[0].requires_grad_(False)
    opt = entry.without_initial_consensus(model.parameters())
    frozen = model[0].weight.detach().clone()
    train(model, opt, 6)
    assert torch.equal(model[0].weight, frozen)
    assert model[0].weight not in opt.state
    model[0].requires_grad_(True)
    train(model, opt, 6)
    assert not torch.equal(model[0].weight, frozen)


@each
def test_hooks(entry):
    p = nn.Parameter(torch.ones(2, 2))
    opt = entry([p])
    calls = []
    opt.register_step_pre_hook(lambda *_: calls.append("pre"))
    opt.register_step_post_hook(lambda *_: calls.append("post"))
    p.grad = torch.ones(2, 2)
    opt.step()
    assert calls == ["pre", "post"]


@each
def test_capturable_equals_plain(entry):
    """Everything in tensors, as for CUDA graphs, gives the same numbers; rules for gamma refuse."""
    settings = {"gamma": 0.99} if "gamma" in entry.settings else {}
    models = network(), network()
    opts = [
        entry(model.parameters(), capturable=capturable, **settings)
        for model, capturable in zip(models, (False, True), strict=True)
    ]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 12)
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-4, atol=1e-5)
    if opts[1].defaults.get("sigma") is not None:
        assert all(isinstance(s, torch.Tensor) for s in opts[1].param_groups[0]["sigma"])


def test_numpy_numbers_become_plain_floats(tmp_path):
    numpy = pytest.importorskip("numpy")
    p = nn.Parameter(torch.ones(2))
    weights = numpy.array([1, 3])
    opt = SISA(
        [p],
        sigma=numpy.float32(0.5),
        rho=torch.tensor([1.0, 2.0]),
        batches=2,
        weights=weights,
    )
    assert opt.param_groups[0]["weights"] == [0.25, 0.75]
    assert opt.param_groups[0]["rho"] == [1.0, 2.0]
    torch.save(opt.state_dict(), tmp_path / "opt.pt")
    opt.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))


def test_groups_that_share_a_learning_rate_share_it_after_loading():
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    opt = SISA([{"params": [a]}, {"params": [b]}], lr=torch.tensor(0.01))
    opt.load_state_dict(opt.state_dict())
    first, second = opt.param_groups
    assert first["lr"] is second["lr"]


def test_distributed_checkpoint_state_dict():
    """torch's own helpers for checkpoints find the state, and give it back."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, other = network(), network()
    a, b = SISA(model.parameters(), batches=2), SISA(other.parameters(), batches=2)
    train(model, a, 5)
    set_optimizer_state_dict(other, b, get_optimizer_state_dict(model, a))
    assert (b.iteration, b.batch) == (2, 1)
    other.load_state_dict(model.state_dict())
    train(model, a, 5, start=5)
    train(other, b, 5, start=5)
    assert torch.equal(weights(model), weights(other))


@pytest.mark.parametrize("cls", [SISA, NSISA, MISA])
def test_flattened_state_dict(cls):
    """torch leaves out the round, which is known if no round can be open."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = network(), network()
    a, b = cls(model.named_parameters()), cls(other.named_parameters())
    train(model, a, 5)
    flat = get_optimizer_state_dict(model, a, options=options)
    set_optimizer_state_dict(other, b, flat, options=options)
    assert (b.iteration, b.synced) == (5, True)
    other.load_state_dict(model.state_dict())
    train(model, a, 5, start=5)
    train(other, b, 5, start=5)
    assert torch.equal(weights(model), weights(other))

    a, b = (cls(m.parameters(), batches=2) for m in (model, other))
    train(model, a, 5)
    train(other, b, 5)
    flat = get_optimizer_state_dict(model, a, options=options)
    with pytest.raises(ValueError, match=r"iteration must be there; .* batches must be 1"):
        set_optimizer_state_dict(other, b, flat, options=options)

    model, several = network(), network()
    a, b = cls(model.parameters()), cls(several.parameters(), batches=2)
    train(model, a, 5)
    flat = get_optimizer_state_dict(model, a, options=options)
    if cls is MISA:
        set_optimizer_state_dict(several, b, flat, options=options)
        assert (b.iteration, b.synced, b.batches) == (5, True, 2)
    else:  # torch 2.6 looks for the state of the second batch before it asks the optimizer
        problem = r"must be for batches=2, got batches=1|state\.0\.weight\.dual\.1"
        with pytest.raises((ValueError, KeyError), match=problem):
            set_optimizer_state_dict(several, b, flat, options=options)
