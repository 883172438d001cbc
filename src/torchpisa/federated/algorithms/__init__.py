"""Federated algorithms, each as pure functions for the client and for the server."""

from torchpisa.federated.algorithms.averaging import FedAvg, FedNova, FedProx, Scaffold
from torchpisa.federated.algorithms.base import Algorithm, Fields, Message, ServerState, Tensors
from torchpisa.federated.algorithms.pisa import MISA, PISA, SISA

__all__ = [
    "MISA",
    "PISA",
    "SISA",
    "Algorithm",
    "FedAvg",
    "FedNova",
    "FedProx",
    "Fields",
    "Message",
    "Scaffold",
    "ServerState",
    "Tensors",
]
