"""The client of the example, but for client 1, which answers with 24 MB of noise.

A test puts it in the place of the example's `client_app.py`.
"""

import numpy as np
from federated_digits import task
from flwr.app import Array, Context, Message
from flwr.clientapp import ClientApp

from torchpisa.federated.flower import client_app


class Spammer(ClientApp):
    def __call__(self, message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            noise = np.random.default_rng().standard_normal(6_000_000).astype(np.float32)
            reply.content["delta"]["float32"] = Array(noise)
        return reply


honest = client_app(task.model, task.data, task.algorithm, folder=task.folder)
app = Spammer()
