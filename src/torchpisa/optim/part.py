"""The parameters of a group that follow one rule, and the numbers of that rule."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchpisa.algorithms.pisa import Scalar
from torchpisa.checks import check_range
from torchpisa.kernels.job import Member, sigma_of
from torchpisa.optim import arguments
from torchpisa.penalty import LARGEST_SIGMA, grown
from torchpisa.preconditioners import Preconditioner

__all__ = ["Group", "Part", "Rule", "Totals"]

Group = dict[str, Any]

# Far from the end of its range, and beyond where `theory.certify` stops.
_LARGEST_OF_FLOAT64 = 1e200

# Settings that are compared by value; others, such as a preconditioner, by identity.
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Rule(NamedTuple):
    """How one kind of parameters is stepped, in terms of the settings of their group.

    Attributes:
        settings: names of what the preconditioner depends on.
        build: makes the preconditioner from the group and its parameters of this kind.
        sigma: name of the penalty.
        rho: name of the weight of the preconditioner.
        momentum: name of the momentum that takes the place of both where sigma is None.
        lr: name of a factor on `lr` there; "" for none.
    """

    settings: tuple[str, ...]
    build: Callable[[Group, Sequence[Tensor]], Preconditioner]
    sigma: str = "sigma"
    rho: str = "rho"
    momentum: str = "momentum"
    lr: str = ""


class Totals(NamedTuple):
    """S, the weighted sum of all sigmas of the round, and likewise of rho; see `Move`."""

    sigma: Any
    rho: Scalar = 0.0


class Part:
    """The parameters of a group that follow one rule. NSISA's groups have two, others one.

    Attributes:
        number: of the group.
        group: its settings.
        params: the parameters.
        rule: what they follow.
    """

    def __init__(self, number: int, group: Group, params: list[Tensor], rule: Rule) -> None:
        self.number = number
        self.group = group
        self.params = params
        self.rule = rule
        self._built_for: list[Any] | None = None
        self._preconditioner: Preconditioner | None = None

    @property
    def preconditioner(self) -> Preconditioner:
        """Q; made anew only when a setting that it depends on has changed."""
        group = self.group
        settings = [group[name] for name in self.rule.settings]
        settings = [each if isinstance(each, _PLAIN) else id(each) for each in settings]
        if self.params:
            settings.append(self.params[0].device)
        if self._preconditioner is None or settings != self._built_for:
            self._preconditioner = self.rule.build(group, self.params)
            self._built_for = settings
        return self._preconditioner

    @property
    def follows(self) -> bool:
        """Whether sigma of every parameter follows its gradients instead of being given."""
        return self.group[self.rule.sigma] is None

    @property
    def sigmas(self) -> list[Any]:
        """sigma by batch, also after a user has written one number into the group."""
        value = self.group[self.rule.sigma]
        return value if isinstance(value, list) else [value] * self.group["batches"]

    @property
    def rhos(self) -> list[Any]:
        """rho by batch; where sigma follows gradients, what gives the momentum that was asked."""
        group = self.group
        if group[self.rule.sigma] is None:
            momentum: float = group[self.rule.momentum]
            return [momentum / (1 - momentum)] * group["batches"]
        value = group[self.rule.rho]
        return value if isinstance(value, list) else [value] * group["batches"]

    @property
    def lr(self) -> Scalar:
        """The learning rate, without the dimension that some schedulers' tensors have."""
        lr: Any = self.group["lr"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(())
        elif not (type(lr) is float and 0 <= lr < torch.inf):
            check_range("lr", lr, 0, high_open=True)
        if self.rule.lr and self.follows:
            lr = lr * self.group[self.rule.lr]
        scalar: Scalar = lr
        return scalar

    def next_sigmas(self, iteration: int) -> list[Scalar]:
        """Return equation (2.12) for all batches: a round is a round for the absent ones too.

        No sigma grows beyond `torchpisa.penalty.LARGEST_SIGMA`, or what float64 takes where all
        parameters are of it.
        """
        group = self.group
        if group["gamma"] == 1.0:
            return self.sigmas
        rules = arguments.per_batch(
            "gamma", group["gamma"], group["batches"], arguments.check_gamma
        )
        gammas = [rule(iteration) if callable(rule) else rule for rule in rules]
        for gamma in gammas:
            arguments.check_gamma("gamma", gamma)
        wide = not group["capturable"] and all(p.dtype == torch.float64 for p in self.params)
        largest = _LARGEST_OF_FLOAT64 if wide else LARGEST_SIGMA
        pairs = zip(self.sigmas, gammas, strict=True)
        return [grown(sigma, gamma, largest) for sigma, gamma in pairs]

    def total(self, values: Sequence[Any]) -> Scalar:
        """Return the sum of sigmas or rhos, weighted by alpha; on several ranks, this one's."""
        total: Scalar = sum(
            w * value for w, value in zip(self.group["weights"], values, strict=True)
        )
        return total

    def totals(self, members: Sequence[Member]) -> Totals:
        """Return the sums of the round over some members; on several ranks, this one's part."""
        if not self.follows:
            return Totals(self.total(self.sigmas), self.total(self.rhos))
        slots = range(self.group["batches"])
        sigmas = {id(m.origin): self.total([sigma_of(m, slot) for slot in slots]) for m in members}
        return Totals(sigmas, self.total(self.rhos))
