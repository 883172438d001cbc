"""No kernel for other devices than CPUs waits for the device.

On the meta device, where tensors have no values, whatever would make the host wait raises.
"""

import pytest
import torch
from torch import nn

from tests.optim.table import ENTRIES
from torchpisa.optim import nonfinite

SHAPES = [(4, 3), (7,), (3, 5)]


@pytest.fixture(autouse=True)
def _device_without_values(monkeypatch):
    monkeypatch.setattr(nonfinite, "DEFERRED_ON", ["meta"])
    # A copy to the host, which the step does not wait for.
    monkeypatch.setattr(nonfinite.Watch, "fetch", lambda *_: None)


def number():
    return torch.empty((), device="meta")


@pytest.mark.parametrize("capturable", [False, True], ids=["eager", "capturable"])
@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_no_step_reads_from_the_device(entry, foreach, capturable):
    settings = {"clip": entry.settings.get("clip", 1.0 if foreach else None)}
    if capturable and "gamma" in entry.settings:  # no functions in a graph
        settings["gamma"] = 0.9
    # To raise, the plain loop looks for infinities before it steps.
    modes = ["raise", "skip", "ignore"] if foreach else ["skip", "ignore"]
    for mode, scaled in [(mode, False) for mode in modes] + [("skip", True)]:
        params = [nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
        opt = entry.without_initial_consensus(
            params, foreach=foreach, capturable=capturable, nonfinite=mode, **settings
        )
        if capturable:
            opt.param_groups[0]["lr"] = number()
        if scaled:
            opt.grad_scale, opt.found_inf = number(), number()
        for step in range(2 * opt.batches):
            for p in params:
                p.grad = None if p is params[step % 3] else torch.empty_like(p)
            opt.step()
        assert opt.iteration == 2
