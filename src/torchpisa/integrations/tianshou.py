"""Tianshou: train reinforcement-learning agents with the optimizers of torchpisa."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

try:
    from tianshou.algorithm.optim import OptimizerFactory
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "tianshou":
        raise
    raise ModuleNotFoundError(
        "torchpisa.integrations.tianshou needs Tianshou 2: pip install 'torchpisa[rl]'",
        name=error.name,
    ) from error

__all__ = ["PISAOptimizerFactory"]


class PISAOptimizerFactory(OptimizerFactory):
    """Hand an optimizer of torchpisa to an algorithm of Tianshou.

    Pass it as `optim=` to PPO, A2C or any other algorithm, in place of Tianshou's
    `AdamOptimizerFactory`. One minibatch of the algorithm is one `step()`; with `batches=m` the
    weights move after every m-th minibatch. A round that is open when an update ends goes on with
    the first minibatches of the next one.

    Wrong arguments raise here, when the factory is made, not later inside the algorithm.

    Args:
        optimizer: `torchpisa.SISA`, `MISA`, `NSISA` or `PISA`; any other optimizer class works too.
        groups: returns parameter groups from the module that the algorithm trains, for instance
            `torchpisa.optim.param_groups.split`; None for all parameters in one group.
        **arguments: arguments of the optimizer, except the parameters.

    Raises:
        TypeError: the optimizer is not a class or function.
        ValueError: the optimizer refuses an argument.
    """

    def __init__(
        self,
        optimizer: Callable[..., Optimizer],
        *,
        groups: Callable[[nn.Module], ParamsT] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        if not callable(optimizer):
            raise TypeError(
                f"optimizer must be a class such as torchpisa.SISA, got {optimizer!r}; "
                "its arguments go to the factory"
            )
        self.optimizer, self.groups, self.arguments = optimizer, groups, arguments
        self.optimizer([nn.Parameter(torch.zeros(2, 2))], **arguments)  # raises what is wrong

    def create_instances(self, module: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimizer of a module and, if the factory was given one, its scheduler."""
        params = module.parameters() if self.groups is None else self.groups(module)
        optimizer = self._create_optimizer_for_params(params)
        if self.lr_scheduler_factory is None:
            return optimizer, None
        return optimizer, self.lr_scheduler_factory.create_scheduler(optimizer)

    def _create_optimizer_for_params(self, params: ParamsT) -> Optimizer:
        return self.optimizer(params, **self.arguments)
