"""NSISA: where it settles, and what it makes of matrices and the rest in one group."""

import pytest
import torch

from tests.optim.test_optimizer import network
from torchpisa import NSISA, SISA


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

    def test_a_group_of_matrices_may_be_a_generator(self):
        """Checking that they are matrices does not use it up."""
        matrix, _ = self.params()
        opt = NSISA([{"params": (p for p in [matrix]), "matrix": True}])
        assert opt.param_groups[0]["params"] == [matrix]

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


def test_nsisa_steps_matrices_and_the_rest_of_a_group_by_rules_of_their_own():
    model = network()
    opt = NSISA(model.parameters(), sigma=50.0, sisa_sigma=0.5)
    (group,) = opt.param_groups
    assert group["params"] == list(model.parameters())
    for p in group["params"]:
        assert ("momentum.0" in opt.state[p], "moment.0" in opt.state[p]) == (
            p.dim() >= 2,
            p.dim() < 2,
        )
    matrices, rest = opt.effective()
    assert (matrices.step, rest.step) == (1 / 50, 1 / 0.5)
