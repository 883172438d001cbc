"""The optimizers of the recipe, as factories for Tianshou."""

from dataclasses import dataclass
from typing import Any

from tianshou.algorithm.optim import (
    AdamOptimizerFactory,
    LRSchedulerFactoryLinear,
    OptimizerFactory,
)
from torch import nn

from recipes.rl.config import Settings
from torchpisa import MISA, SISA
from torchpisa.integrations.tianshou import PISAOptimizerFactory
from torchpisa.penalty import WarmDown

__all__ = ["EpochDecay", "factory"]


@dataclass(frozen=True)
class EpochDecay:
    r"""The \(\gamma_\ell\) of the paper's reinforcement learning, applied once per epoch.

    \(1 - 1/(E - \lfloor \ell/n \rfloor)\) in every last round of an epoch, 1 in all others: after k
    epochs sigma is \(E/(E - k)\) times its first value, as with Tianshou's linear decay of the
    learning rate. In every round, as it is printed, sigma would grow \((E/(E - k))^n\)-fold,
    100,000-fold in a tenth of the training, and nothing would move any more.

    Args:
        horizon: E, epochs of the whole training.
        rounds: n, rounds in an epoch.
    """

    horizon: int
    rounds: int

    def __call__(self, iteration: int) -> float:
        last = (iteration + 1) % self.rounds == 0
        return WarmDown(self.horizon)(iteration // self.rounds) if last else 1.0


def factory(settings: Settings) -> OptimizerFactory:
    """Return the factory of a run's optimizer.

    What has a learning rate has Tianshou's, and its linear decay; SISA with the paper's row has a
    gamma, which is a decay of its own.
    """
    chosen = OPTIMIZERS[settings.choice.label](settings)
    if "lr" not in settings.choice.options:
        return chosen
    return chosen.with_lr_scheduler_factory(
        LRSchedulerFactoryLinear(
            max_epochs=settings.horizon,
            epoch_num_steps=settings.epoch_steps,
            collection_step_num_env_steps=settings.collect,
        )
    )


def sisa(settings: Settings) -> OptimizerFactory:
    choice = settings.choice
    gamma = EpochDecay(settings.horizon, settings.rounds)
    options = {"batches": choice.batches, "gamma": gamma, "eps": 1e-8, "nonfinite": "ignore"}
    return PISAOptimizerFactory(SISA, **choice.options, **options)


def sisa_lr(settings: Settings) -> OptimizerFactory:
    return PISAOptimizerFactory(SISA, nonfinite="ignore", **settings.choice.options)


def misa(settings: Settings) -> OptimizerFactory:
    return PISAOptimizerFactory(
        MISA, groups=hidden_matrices, nonfinite="ignore", **settings.choice.options
    )


def adam(settings: Settings) -> OptimizerFactory:
    return AdamOptimizerFactory(**settings.choice.options)


# A run that diverges is seen by its weights and ends: gradients are not looked at.
OPTIMIZERS = {"sisa": sisa, "misa": misa, "adam": adam, "sisa_lr": sisa_lr}


def hidden_matrices(module: nn.Module) -> list[dict[str, Any]]:
    """Return groups for MISA, which orthogonalises neither output layers nor the spread."""
    hidden, rest = [], []
    for name, param in module.named_parameters():
        (hidden if ".preprocess." in name and param.dim() == 2 else rest).append((name, param))
    return [{"params": hidden, "matrix": True}, {"params": rest, "matrix": False}]
