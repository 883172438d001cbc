"""Tests that need a GPU: decisions on the device without waiting, CUDA graphs, moved models."""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa import MISA, NSISA, PISA, SISA
from torchpisa.kernels import newton_schulz

pytestmark = pytest.mark.gpu

each = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def train(model, opt, steps, device):
    for k in range(steps):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(8, 8, generator=generator).to(device)
        y = torch.randint(0, 3, (8,), generator=generator).to(device)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def weights(model):
    return torch.cat([p.detach().flatten().cpu() for p in model.parameters()])


def distance(one, other):
    return float((weights(one) - weights(other)).norm() / weights(one).norm())


def tolerance(entry):
    """Newton-Schulz multiplies the rounding errors of small singular values; whitening keeps its
    root in bfloat16, so a last digit may become a third one."""
    if entry.make is NSISA:
        return 3e-2
    return 1e-3 if "before" in entry.settings else 1e-4


@each
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_gpu_equals_cpu(entry, foreach):
    cpu, gpu = network(), network().cuda()
    train(cpu, entry(cpu.parameters(), foreach=foreach), 12, "cpu")
    train(gpu, entry(gpu.parameters(), foreach=foreach), 12, "cuda")
    assert distance(cpu, gpu) < tolerance(entry)


def duals(opt, name="dual"):
    """MISA's batches share one; the others have one each."""
    return [state.get(name, state.get(f"{name}.0")) for state in opt.state.values()]


@each
def test_model_moved_after_construction(entry):
    early, late = network(), network().cuda()
    opt = entry(early.parameters())
    early.cuda()
    train(early, opt, 6, "cuda")
    train(late, entry(late.parameters()), 6, "cuda")
    torch.testing.assert_close(weights(early), weights(late), rtol=1e-5, atol=1e-6)
    assert all(dual.is_cuda for dual in duals(opt))


@each
def test_model_moved_back(entry):
    model, expected = network().cuda(), network()
    opt = entry(model.parameters())
    train(model, opt, 6, "cuda")
    model.cpu()
    train(model, opt, 6, "cpu")
    other = entry(expected.parameters())
    for _ in range(2):
        train(expected, other, 6, "cpu")
    assert distance(expected, model) < tolerance(entry)


@each
def test_state_loads_onto_the_device(entry):
    cpu, gpu = network(), network().cuda()
    a = entry(cpu.parameters())
    train(cpu, a, 5, "cpu")
    b = entry.without_initial_consensus(gpu.parameters())
    b.load_state_dict(a.state_dict())
    assert all(dual.is_cuda for dual in duals(b))
    assert all(counter.device.type == "cpu" for counter in duals(b, "step"))


@pytest.mark.parametrize("batches", [1, 3])
def test_skip_does_not_wait_for_the_device(no_waiting, batches):
    model = network().cuda()
    opt = SISA(model.parameters(), batches=batches, nonfinite="skip", clip=1.0)
    train(model, opt, 2 * batches, "cuda")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with no_waiting():
        for _ in range(2 * batches):
            opt.step()


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_half_precision_with_grad_scaler(batches, scaled):
    model = network().cuda()
    opt = SISA(model.parameters(), batches=batches)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40 if scaled else 1024.0)
    losses = []
    for _ in range(60):
        x = torch.randn(32, 8, device="cuda")
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("foreach", [None, True], ids=["default", "foreach"])
@pytest.mark.parametrize("cls", [SISA, NSISA])
def test_cuda_graph_replay_equals_eager(cls, foreach, batches):
    """A whole round is captured; lr and sigma change between replays, in place."""

    def setup():
        model = network().cuda()
        lr = torch.tensor(1.0, device="cuda")
        settings = {"batches": batches, "capturable": True, "gamma": 0.99, "foreach": foreach}
        # foreach leaves batches that may not count to the loop.
        settings["nonfinite"] = "ignore" if foreach else "skip"
        settings |= {"sigma": 0.5, "rho": 1e3} if cls is SISA else {}
        opt = cls(model.parameters(), lr=lr, **settings)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        return model, opt, lr

    def fill(model, k):
        for p in model.parameters():
            torch.manual_seed(k)
            p.grad.copy_(torch.randn_like(p))

    eager, opt, lr = setup()
    for k in range(8):
        lr.fill_(1 / (1 + k))
        fill(eager, k)
        for _ in range(batches):
            opt.step()

    model, opt, lr = setup()
    start = [p.detach().clone() for p in model.parameters()]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3 * batches):
            opt.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(batches):
            opt.step()
    fresh, other, _ = setup()
    with torch.no_grad():
        for p, q in zip(model.parameters(), start, strict=True):
            p.copy_(q)
        for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
            for key, value in other.state[q].items():
                if isinstance(value, torch.Tensor):
                    opt.state[p][key].copy_(value)
        for group, new in zip(opt.param_groups, other.param_groups, strict=True):
            for sigma, value in zip(group["sigma"], new["sigma"], strict=True):
                sigma.copy_(value)
    for k in range(8):
        lr.fill_(1 / (1 + k))
        fill(model, k)
        graph.replay()
    torch.testing.assert_close(weights(model), weights(eager), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
def test_parameters_on_several_devices(foreach):
    """One optimizer, one clip and one decision about infinities over CPU and GPU parameters."""
    ends = []
    for devices in (("cpu", "cpu"), ("cpu", "cuda")):
        params = [nn.Parameter(torch.ones(4, 3, device=device)) for device in devices]
        opt = SISA(params, batches=2, clip=0.5, nonfinite="skip", foreach=foreach)
        for k in range(12):
            for j, p in enumerate(params):
                generator = torch.Generator().manual_seed(10 * k + j)
                p.grad = torch.randn(4, 3, generator=generator).to(p.device)
            if k == 5:
                params[1].grad[0, 0] = float("nan")
            opt.step()
        ends.append([p.detach().cpu() for p in params])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("foreach", [None, True], ids=["default", "foreach"])
@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_default_does_not_wait_for_the_device(no_waiting, cls, foreach, clip, batches):
    """Although it looks for infinities, and raises when the host hears of them."""
    model = network().cuda()
    opt = cls(model.parameters(), batches=batches, foreach=foreach, clip=clip)
    train(model, opt, 2 * batches, "cuda")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    with no_waiting():
        for _ in range(2 * batches):
            opt.step()


# Square, on the short side with all of its memory apart and within, in blocks of tiles, for Hopper.
LARGE = [(256, 256), (768, 256), (256, 640), (264, 1000), (1024, 1024), (1024, 2560)]


def large(dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, device="cuda").to(dtype))
        for shape in LARGE
    ]


def step_with_noise(opt, params, k):
    generator = torch.Generator("cuda").manual_seed(k)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator, device="cuda").to(p.dtype)
    opt.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"row_beta": None, "clip": 1.0}, {"damping": 0.1}, {"blocks": 4}, {"batches": 2}],
    ids=str,
)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_large_matrices_do_not_wait(no_waiting, settings, dtype, tensors):
    """Products are taken by halves and on the short side here, as they are in a training."""
    params = large(dtype)
    more = {"lr": torch.tensor(1e-3, device="cuda"), "capturable": True} if tensors else {}
    opt = MISA(params, **settings, **more)
    for k in range(4):
        step_with_noise(opt, params, k)
    with no_waiting():
        for k in range(4):
            step_with_noise(opt, params, k)
    assert all(p.isfinite().all() for p in params)


@pytest.mark.parametrize("row_beta", [None, 0.95])
def test_large_matrices_equal_the_loop(row_beta):
    """In float32 to 1e-5; products in float16 err no more than the loop's in float16."""
    ends = {}
    for fused in (False, True):
        for dtype in (None, torch.float16):
            params = large()
            way = {"fused": True} if fused else {"fused": False, "foreach": False}
            opt = MISA(params, lr=0.01, row_beta=row_beta, ns_dtype=dtype, **way)
            for k in range(20):
                step_with_noise(opt, params, k)
            ends[fused, dtype] = torch.cat([p.detach().flatten() for p in params])
    exact = ends[False, None]
    errors = {way: float((end - exact).norm() / exact.norm()) for way, end in ends.items()}
    assert errors[True, None] <= 1e-5
    assert errors[True, torch.float16] <= 1.5 * errors[False, torch.float16] + 1e-5


@pytest.mark.parametrize("settings", [{}, {"row_beta": None}, {"damping": 0.1}], ids=str)
def test_large_matrices_in_a_cuda_graph(settings):
    ends = []
    for captured in (False, True):
        params = large()
        opt = MISA(params, capturable=True, **settings)
        for p in params:
            p.grad = torch.zeros_like(p)
        for _ in range(3):  # builds the table, compiles the kernels; zeros move nothing but decay
            opt.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                opt.step()
        for k in range(5):
            generator = torch.Generator("cuda").manual_seed(k)
            for p in params:
                p.grad.copy_(torch.randn(p.shape, generator=generator, device="cuda"))
            if captured:
                graph.replay()
            else:
                opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in params]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("foreach", [None, True], ids=["default", "foreach"])
@pytest.mark.parametrize("cls", [PISA, SISA, NSISA, MISA])
def test_nonfinite_gradients_are_reported_later(cls, foreach):
    """They never reach weights or state, and the error names the parameter."""
    model = network().cuda()
    opt = cls(model.named_parameters(), foreach=foreach)
    train(model, opt, 3, "cuda")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model[0].weight.grad[1, 1] = float("nan")
    opt.step()
    torch.cuda.synchronize()
    with pytest.raises(FloatingPointError, match=r"batch 0 of iteration 3: 0\.weight\."):
        opt.step()
    held = [v for own in opt.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *held))
    train(model, opt, 3, "cuda")
    opt.flush()


@pytest.mark.parametrize("cls", [SISA, NSISA, MISA])
def test_whole_training_step_in_a_graph(cls):
    """Forward, backward and step: the gradients live in the graph's own memory. Steps taken beside
    it, on other gradients, do not disturb the replays."""
    x = torch.randn(16, 8, device="cuda")
    y = torch.randint(0, 3, (16,), device="cuda")
    side = torch.cuda.Stream()

    def step(model, opt):
        opt.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()

    eager, graphed = network().cuda(), network().cuda()
    plain = cls(eager.parameters(), capturable=True)
    for _ in range(11):
        step(eager, plain)
    opt = cls(graphed.parameters(), capturable=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(graphed, opt)
    torch.cuda.current_stream().wait_stream(side)
    opt.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        nn.functional.cross_entropy(graphed(x), y).backward()
        opt.step()
    for _ in range(4):
        graph.replay()
    kept = [p.grad for p in graphed.parameters()]
    step(graphed, opt)
    for p, grad in zip(graphed.parameters(), kept, strict=True):
        p.grad = grad
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(weights(graphed), weights(eager), rtol=1e-4, atol=1e-5)


def peak_of_a_step(opt):
    for _ in range(2 * opt.batches):
        opt.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(opt.batches):
        opt.step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_full_size_temporaries(batches, clip):
    params = [nn.Parameter(torch.randn(1000, 4000, device="cuda")) for _ in range(2)]
    for p in params:
        p.grad = torch.randn_like(p)
    settings = {"batches": batches, "clip": clip, "weight_decay": 0.1}
    opt = SISA(params, sigma=0.5, rho=1e3, fused=True, **settings)
    assert peak_of_a_step(opt) <= 0.01 * sum(4 * p.numel() for p in params)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_no_full_size_temporaries_without_sigma(clip):
    params = [nn.Parameter(torch.randn(1000, 4000, device="cuda")) for _ in range(2)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = SISA(params, clip=clip, fused=True)
    assert peak_of_a_step(opt) <= 0.01 * sum(4 * p.numel() for p in params)


@pytest.mark.parametrize("cls", [NSISA, MISA])
def test_temporaries_of_newton_schulz_keep_to_their_bound(cls, monkeypatch):
    monkeypatch.setattr(newton_schulz, "CHUNK_BYTES", 16 * 2**20)
    params = [nn.Parameter(torch.randn(512, 2048, device="cuda")) for _ in range(8)]
    params += [nn.Parameter(torch.randn(2048, 512, device="cuda")) for _ in range(3)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = cls(params, fused=True)
    assert 8 * 2**20 < peak_of_a_step(opt) <= 16 * 2**20 + 0.01 * sum(4 * p.numel() for p in params)


def test_one_launch_for_all_parameters():
    params = [nn.Parameter(torch.randn(n, device="cuda")) for n in (5, 3000, 64, 1)]
    opt = SISA(params, sigma=0.5, rho=1e3, fused=True, nonfinite="ignore")
    for p in params:
        p.grad = torch.randn_like(p)
    opt.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as recorded:
        opt.step()
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events()]
    assert sum("local_step_kernel" in name for name in names) == 1
    assert sum("kernel" in name for name in names) == 2  # and the count of steps


@pytest.mark.parametrize("eta", [0.5, float("inf")])
def test_batches_that_miss_a_parameter(eta):
    """They count with gradient zero, beside fused kernels, whose counters are on the device."""
    ends = []
    for device in ("cpu", "cuda"):
        params = [nn.Parameter(torch.ones(5, device=device)) for _ in range(2)]
        opt = SISA(params, batches=2, eta=eta)
        for k in range(8):
            params[0].grad = torch.full_like(params[0], 0.1 * k)
            params[1].grad = torch.full_like(params[1], 1.0) if k % 2 else None
            opt.step()
        ends.append(torch.cat([p.detach().cpu() for p in params]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-6)
