"""Federated algorithms, each as a client's and a server's half of pure functions."""

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
