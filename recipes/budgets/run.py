"""One run: mini-batches, the same number of samples for everybody, and rates that fall to zero."""

from collections.abc import Iterator

from recipes.budgets.config import Config, Settings
from recipes.heterogeneity.run import CLASSES, trace
from recipes.recipe import Line
from torchpisa import federated
from torchpisa.federated import LinearDecay, Minibatches

__all__ = ["algorithm", "run"]

# The argument that takes the schedule: of the server's step where the server has an optimizer.
SCHEDULES = {
    "sisa": "lr",
    "misa": "lr",
    "misa_local": "lr",
    "fedavgm": "server_lr_decay",
    "fedadam": "server_lr_decay",
    "server_muon": "server_lr_decay",
}


MAKERS = {**CLASSES, "misa_local": federated.LocalMISA}


def algorithm(settings: Settings) -> federated.Algorithm:
    """Return the algorithm of a run."""
    schedule = {SCHEDULES.get(settings.algorithm, "lr_decay"): LinearDecay(settings.rounds)}
    local = Minibatches(settings.steps, settings.batch_size)
    return MAKERS[settings.algorithm](**settings.options, **schedule, local=local)


def run(config: Config, settings: Settings, *, device: str, data: str) -> Iterator[Line]:
    """Yield accuracy and costs so far, every few rounds; one that diverges ends early."""
    return trace(settings, algorithm(settings), device=device, data=data)
