"""The paper's hyperparameter table: the rows of SISA that the recipes train with, frozen.

mu is the L2 term in the gradient of every batch and lambda that of the consensus, each on its own,
as in the published scripts; in VGG-11's row lambda is larger than mu. The table has no beta of the
second moment: it comes from the scripts' commands.
"""

from dataclasses import dataclass
from typing import Any

__all__ = ["PAPER_TABLE", "PaperRow"]


@dataclass(frozen=True)
class PaperRow:
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
        """Return the arguments of SISA, with gamma in epochs."""
        options: dict[str, Any] = {"sigma": self.sigma, "rho": self.rho, "beta": self.beta}
        options |= {"eps": 1e-8, "weight_decay": self.mu, "consensus_decay": self.consensus_decay}
        return options if self.gamma is None else {**options, "gamma": self.gamma}


PAPER_TABLE = {
    "imagenet/resnet18": PaperRow(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/vit_b_16": PaperRow(0.005, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/alexnet": PaperRow(0.05, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/densenet121": PaperRow(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/resnet18_test": PaperRow(1.0, 2e3, None, 1e-2, 5e-6, 100, 4, 5000, 64),
    "cifar10/resnet34": PaperRow(0.1, 5e3, (0.80, 15), 5e-5, 0.0, 200, 4, 390, 32),
    "cifar10/vgg11": PaperRow(4.5, 3e4, (0.90, 10), 2.5e-4, 4e-4, 200, 4, 390, 32, beta=0.995),
    "cifar10/densenet121": PaperRow(0.8, 2e3, (0.25, 50), 5e-4, 5e-5, 200, 4, 390, 64),
    "rl/ant": PaperRow(5.0, 2e4, None, 0.0, 0.0, 100, 4, 112, 64, warm_down=True),
    "rl/humanoid": PaperRow(0.1, 1e5, None, 0.0, 0.0, 100, 4, 112, 64, warm_down=True),
    "rl/half_cheetah": PaperRow(0.5, 2e2, None, 0.0, 0.0, 100, 4, 117, 64, warm_down=True),
    "rl/double_pendulum": PaperRow(0.5, 2e2, None, 0.0, 0.0, 100, 4, 117, 64, warm_down=True),
    "gan/wgan": PaperRow(0.1, 1e3, None, 0.0, 5e-5, 100, 4, 937, 16),
    "gan/wgan_gp": PaperRow(5e-5, 2e2, None, 0.0, 1e-4, 100, 2, 937, 32),
    "rnn/1": PaperRow(0.04, 4e2, None, 1.2e-6, 0.0, 200, 4, 663, 5),
    "rnn/2": PaperRow(0.01, 2e2 / 3, None, 1.2e-6, 0.0, 200, 4, 663, 5),
    "rnn/3": PaperRow(0.01, 2e2 / 3, None, 1.2e-6, 0.0, 200, 4, 663, 5),
}
"""By task and model; `resnet18_test` is the row of the table's part on testing."""
