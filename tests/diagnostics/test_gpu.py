"""On a GPU: nothing waits for it, models that move, graphs."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.diagnostics import literal
from tests.diagnostics.test_diagnostics import Rows, iterations
from tests.diagnostics.test_measure import network
from torchpisa import NSISA, SISA
from torchpisa.diagnostics import Diagnostics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:the . batches hardly agree:UserWarning"),
]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("make", [SISA, NSISA])
def test_no_step_waits_for_the_device(make: Any) -> None:
    rows: Rows = []
    model = network(torch.float32).cuda()
    opt = make(model.parameters(), batches=2)
    batches = [(torch.randn(8, 6).cuda(), torch.randn(8, 3).cuda()) for _ in range(2)]
    with Diagnostics(opt, every=2, callback=rows.append) as watch:
        try:
            for k in range(20):
                if k == 8:  # everything has been compiled and allocated
                    torch.cuda.synchronize()
                    torch.cuda.set_sync_debug_mode("error")
                x, y = batches[k % 2]
                opt.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                opt.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        old = literal.copied(opt)
        for x, y in [*batches, *batches]:
            opt.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if opt.iteration == 11:
                old = literal.copied(opt) if opt.synced else old
            opt.step()
        expected = literal.row(opt, old, literal.copied(opt))
        names = ("primal_residual", "dual_residual", "dual_norm", "spread", "weight_norm")
        for name in names:
            assert watch.latest[name] == pytest.approx(expected[name], rel=1e-3)
    assert iterations(rows) == [2, 4, 6, 8, 10, 12]


def test_a_model_that_is_moved() -> None:
    rows: Rows = []
    model = network(torch.float32)
    opt = SISA(model.parameters())
    with Diagnostics(opt, every=1, callback=rows.append) as watch:
        for device in ("cpu", "cuda"):
            model.to(device)
            for _ in range(3):
                for param in model.parameters():
                    param.grad = torch.randn_like(param)
                opt.step()
        assert watch.latest["iteration"] == 6
    assert iterations(rows) == [1, 2, 3, 5, 6]


def test_a_graph_is_captured_without_it() -> None:
    param = nn.Parameter(torch.ones(100, device="cuda"))
    param.grad = torch.ones_like(param)
    opt = SISA([param], capturable=True)
    with Diagnostics(opt, every=1) as watch:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                opt.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            opt.step()
        graph.replay()
        assert watch.latest["iteration"] == 3
