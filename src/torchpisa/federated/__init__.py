"""Federated learning: partitions of data, algorithms, and a simulation of all clients.

For real clients on many machines there is `torchpisa.federated.flower`.
"""

from torchpisa.federated import partition, picture
from torchpisa.federated.algorithms import (
    MISA,
    PISA,
    SISA,
    AdaptiveFedADMM,
    Algorithm,
    FedAdagrad,
    FedAdam,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedMuon,
    FedNova,
    FedPD,
    FedProx,
    FedYogi,
    LocalMISA,
    Scaffold,
    ServerMuon,
)
from torchpisa.federated.clients.local_work import Epochs, FullGradient, Minibatches
from torchpisa.federated.clients.objective import accuracy, cross_entropy
from torchpisa.federated.schedules import LinearDecay
from torchpisa.federated.simulation import Counts, Simulation
from torchpisa.federated.timing import LognormalDelay, Timing
from torchpisa.federated.trust.privacy import GaussianNoise
from torchpisa.federated.trust.reference import Reference
from torchpisa.federated.trust.robust import RobustSelection

__all__ = [
    "MISA",
    "PISA",
    "SISA",
    "AdaptiveFedADMM",
    "Algorithm",
    "Counts",
    "Epochs",
    "FedADMM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedDyn",
    "FedMuon",
    "FedNova",
    "FedPD",
    "FedProx",
    "FedYogi",
    "FullGradient",
    "GaussianNoise",
    "LinearDecay",
    "LocalMISA",
    "LognormalDelay",
    "Minibatches",
    "Reference",
    "RobustSelection",
    "Scaffold",
    "ServerMuon",
    "Simulation",
    "Timing",
    "accuracy",
    "cross_entropy",
    "partition",
    "picture",
]
