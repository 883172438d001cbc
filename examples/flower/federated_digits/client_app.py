"""The client."""

from federated_digits import task
from torchpisa.federated.flower import client_app

app = client_app(task.model, task.data, task.algorithm, folder=task.folder)
