"""The settings of the paper, by name; they stay the same when defaults change.

mu is the L2 term in the gradient of every batch and lambda that of the consensus. They are
independent, as in the published scripts: in VGG-11's row lambda is larger than mu. The paper's
table has no beta of the second moment, which comes from the commands of the scripts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchpisa.checks import check_count
from torchpisa.penalty import Gamma, WarmDown, gamma_l

__all__ = ["PAPER_TABLE", "PRESETS", "PaperRow", "Preset"]


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's hyperparameter table, for SISA.

    Attributes:
        sigma: initial sigma of every batch.
        rho: rho of every batch.
        gamma: (t, s) where sigma is divided by t every s epochs; None where it stays.
        mu: L2 term in the gradients.
        consensus_decay: lambda, L2 term of the consensus.
        epochs: E.
        batches: m.
        rounds: n, of an epoch.
        samples: samples of a batch in a round, |D_ij|.
        beta: decay of the second moment.
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
        """Return arguments of SISA, with gamma in epochs."""
        options: dict[str, Any] = {"sigma": self.sigma, "rho": self.rho, "beta": self.beta}
        options |= {"eps": 1e-8, "weight_decay": self.mu, "consensus_decay": self.consensus_decay}
        return options if self.gamma is None else {**options, "gamma": self.gamma}

    def rule(self, rounds: int, epochs: int) -> Gamma:
        """Return gamma as a function of the round.

        Args:
            rounds: the rounds of an epoch.
            epochs: the epochs of the whole training.
        """
        if self.warm_down:
            return WarmDown(epochs, rounds)
        return 1.0 if self.gamma is None else gamma_l(*self.gamma, rounds)


PAPER_TABLE = {
    "imagenet/resnet18": PaperRow(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/vit_b_16": PaperRow(0.005, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/alexnet": PaperRow(0.05, 2e4, None, 0.0, 0.0, 380, 4, 4, 80_000),
    "imagenet/densenet121": PaperRow(0.005, 2e3 / 3, None, 0.0, 0.0, 303, 4, 4, 80_000),
    "imagenet/resnet18_test": PaperRow(1.0, 2e3, None, 1e-2, 5e-6, 100, 4, 5000, 64),
    "cifar10/resnet34": PaperRow(0.1, 5e3, (0.80, 15), 5e-5, 0.0, 200, 4, 390, 32),
    "cifar10/vgg11": PaperRow(4.5, 3e4, (0.90, 10), 2.5e-4, 4e-4, 200, 4, 390, 32, beta=0.995),
    "cifar10/densenet121": PaperRow(0.8, 2e3, (0.25, 50), 5e-4, 5e-5, 200, 4, 390, 64),
    "finetune/gpt2_124m": PaperRow(0.01, 2.5e4, None, 0.0, 0.0, 80, 4, 4, 62, warm_down=True),
    "finetune/gpt2_335m": PaperRow(0.01, 1e4, None, 0.0, 0.0, 150, 4, 4, 62, warm_down=True),
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
"""Rows by task and model; `resnet18_test` is from the part of the table on testing."""


@dataclass(frozen=True)
class Preset:
    """Named settings of an optimizer.

    Attributes:
        optimizer: its name, as `torchpisa.create` takes it.
        description: the source of the settings.
        settings: arguments of the optimizer.
        row: the row of the table behind it, whose gamma depends on the length of an epoch.
    """

    optimizer: str
    description: str
    settings: Mapping[str, Any]
    row: PaperRow | None = None

    def arguments(self, rounds: int | None = None, epochs: int | None = None) -> dict[str, Any]:
        """Return arguments of the optimizer.

        Args:
            rounds: the rounds of an epoch, for gamma; by default as many as in the paper.
            epochs: the epochs of the whole training, by default as many as in the paper.
        """
        options = dict(self.settings)
        if self.row is not None:
            rounds = self.row.rounds if rounds is None else rounds
            epochs = self.row.epochs if epochs is None else epochs
            check_count("rounds", rounds)
            check_count("epochs", epochs)
            options["gamma"] = self.row.rule(rounds, epochs)
        return options


def _of_row(key: str, row: PaperRow) -> Preset:
    settings = {**row.options(), "batches": row.batches}
    settings.pop("gamma", None)
    where = f"hyperparameter table of the paper, {key.replace('/', ', ').replace('_', ' ')}"
    return Preset("sisa", where, MappingProxyType(settings), row)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        **{
            f"paper/{key.removeprefix('cifar10/')}": _of_row(key, row)
            for key, row in PAPER_TABLE.items()
        },
        "paper/gpt2": Preset(
            "nsisa",
            "published GPT-2 script, hidden matrices; it has AdamW for the embedding",
            MappingProxyType(
                {
                    **{"sigma": 80.0, "rho": 100.0, "momentum": 0.95, "nesterov": True},
                    **{"aspect_scaling": True, "dual_decay": 0.25, "ns_steps": 5, "batches": 1},
                }
            ),
        ),
    }
)
"""Presets by name: `paper/MODEL` for CIFAR-10, `paper/TASK/MODEL` for other tasks."""
