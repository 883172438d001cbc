"""The client of the example, but for client 1, which lies in some rounds.

A test puts it in the place of the example's `client_app.py`.
"""

import json
import math

import numpy as np
from federated_digits import task
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from torchpisa.federated.flower import client_app


def poisoned(content: RecordDict, number: float) -> None:
    entries = content["delta"]["float32"].numpy().copy()
    entries[7] = np.float32(number)
    content["delta"]["float32"] = Array(entries)


def reshaped(content: RecordDict) -> None:
    layout = json.loads(content["torchpisa"]["layout.delta"])
    layout[0][2].reverse()
    content["torchpisa"]["layout.delta"] = json.dumps(layout)


LIES = {
    1: lambda content: poisoned(content, math.nan),
    3: lambda content: poisoned(content, 1e30),
    4: reshaped,
}


class Liar(ClientApp):
    def __call__(self, message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            lie = LIES.get(message.content["torchpisa"]["iteration"])
            if lie is not None:
                lie(reply.content)
        return reply


honest = client_app(task.model, task.data, task.algorithm, folder=task.folder)
app = Liar()
