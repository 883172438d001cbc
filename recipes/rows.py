"""The paper's hyperparameter table: the rows of SISA that recipes here train with, frozen.

mu is the L2 term in the gradient of every batch and lambda that of the consensus, each on its own,
as in the published scripts; in VGG-11's row lambda is larger than mu. The table has no beta of the
second moment: it comes from the scripts' commands.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        sigma: of every batch at the start.
        rho: of every batch.
        gamma: (t, s) where sigma is divided by t every s epochs; None where it stays.
        mu: L2 term in the gradients.
        consensus_decay: lambda, L2 term of the consensus.
        epochs: E.
        batches: m.
        rounds: n, of an epoch.
        samples: of a batch in a round, |D_ij|.
        beta: of the second moment.
        warm_down: whether gamma is 1 - 1/(E - floor(l/n)); `gamma` is None then.
    """

    sigma: float
    rho: float
    gamma: tuple[float, int] | None
    mu: float
    consensus_decay: float
    epochs: int
    batches: int
    rounds: int
    samples: int
    beta: float = 0.999
    warm_down: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of SISA, with gamma in epochs."""
        made: dict[str, Any] = {"sigma": self.sigma, "rho": self.rho, "beta": self.beta}
        made |= {"eps": 1e-8, "weight_decay": self.mu, "consensus_decay": self.consensus_decay}
        return made if self.gamma is None else {**made, "gamma": self.gamma}


ROWS = {
    "imagenet/resnet18": Row(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/vit_b_16": Row(0.005, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/alexnet": Row(0.05, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/densenet121": Row(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/resnet18_test": Row(1.0, 2e3, None, 1e-2, 5e-6, 100, 4, 5000, 64),
    "cifar10/resnet34": Row(0.1, 5e3, (0.80, 15), 5e-5, 0.0, 200, 4, 390, 32),
    "cifar10/vgg11": Row(4.5, 3e4, (0.90, 10), 2.5e-4, 4e-4, 200, 4, 390, 32, beta=0.995),
    "cifar10/densenet121": Row(0.8, 2e3, (0.25, 50), 5e-4, 5e-5, 200, 4, 390, 64),
    "rl/ant": Row(5.0, 2e4, None, 0.0, 0.0, 100, 4, 112, 64, warm_down=True),
    "rl/humanoid": Row(0.1, 1e5, None, 0.0, 0.0, 100, 4, 112, 64, warm_down=True),
    "rl/half_cheetah": Row(0.5, 2e2, None, 0.0, 0.0, 100, 4, 117, 64, warm_down=True),
    "rl/double_pendulum": Row(0.5, 2e2, None, 0.0, 0.0, 100, 4, 117, 64, warm_down=True),
    "gan/wgan": Row(0.1, 1e3, None, 0.0, 5e-5, 100, 4, 937, 16),
    "gan/wgan_gp": Row(5e-5, 2e2, None, 0.0, 1e-4, 100, 2, 937, 32),
    "rnn/1": Row(0.04, 4e2, None, 1.2e-6, 0.0, 200, 4, 663, 5),
    "rnn/2": Row(0.01, 2e2 / 3, None, 1.2e-6, 0.0, 200, 4, 663, 5),
    "rnn/3": Row(0.01, 2e2 / 3, None, 1.2e-6, 0.0, 200, 4, 663, 5),
}
"""By task and model; `resnet18_test` is the row of the table's part on testing."""
