"""Federated training on many machines, with Flower (`pip install torchpisa[flower]`).

The server runs a `FederatedStrategy`, every client a `client_app`; both take the same algorithm of
`torchpisa.federated`. Clients keep their memory (duals, moments, control variates), the server
keeps its sum, and both survive being killed. See the page on Flower.
"""

try:
    import flwr  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "flwr":
        raise
    raise ModuleNotFoundError(
        "torchpisa.federated.flower needs Flower: pip install 'torchpisa[flower]'", name=error.name
    ) from error

from torchpisa.federated.durable_files import DamagedFileError
from torchpisa.federated.flower.checkpoint import InUseError
from torchpisa.federated.flower.client import client_app
from torchpisa.federated.flower.records import arrays, load_arrays
from torchpisa.federated.flower.screen import Screen
from torchpisa.federated.flower.strategy import FederatedStrategy, NobodyTrainsError
from torchpisa.federated.trust.privacy import GaussianNoise

__all__ = [
    "DamagedFileError",
    "FederatedStrategy",
    "GaussianNoise",
    "InUseError",
    "NobodyTrainsError",
    "Screen",
    "arrays",
    "client_app",
    "load_arrays",
]
