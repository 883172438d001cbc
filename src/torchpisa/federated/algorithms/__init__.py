"""Federated algorithms, each as pure functions for the client and for the server."""

from torchpisa.federated.algorithms.averaging import FedAvg, FedNova, FedProx, Scaffold
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState, Tensors
from torchpisa.federated.algorithms.fedadmm import AdaptiveFedADMM, FedADMM
from torchpisa.federated.algorithms.feddyn import FedDyn
from torchpisa.federated.algorithms.fedmuon import FedMuon
from torchpisa.federated.algorithms.fedpd import FedPD
from torchpisa.federated.algorithms.pisa import MISA, PISA, SISA, LocalMISA
from torchpisa.federated.algorithms.server_optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    ServerMuon,
)

__all__ = [
    "MISA",
    "PISA",
    "SISA",
    "AdaptiveFedADMM",
    "Algorithm",
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
    "Fields",
    "LocalMISA",
    "Message",
    "Scaffold",
    "ServerMuon",
    "ServerState",
    "Tensors",
]
