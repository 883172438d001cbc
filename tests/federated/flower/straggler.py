"""The client of the example, but for client 1, whose answers are late while a file says so.

A test puts it in the place of the example's `client_app.py`. While there is a file `hold` in the
client's folder, client 1 computes, saves its memory, says in the file `held` which update it has
computed, and does not answer.
"""

import os
import time
from pathlib import Path

from federated_digits import task
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from torchpisa.federated.flower import client_app


class Straggler(ClientApp):
    def __call__(self, message: Message, context: Context) -> Message:
        reply = punctual(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 1:
            folder = Path(context.node_config["folder"])
            if (folder / "hold").exists():
                new = folder / f"held.{os.getpid()}"
                new.write_text(str(reply.content["torchpisa"]["iteration"]))
                new.replace(folder / "held")
            while (folder / "hold").exists():
                time.sleep(0.05)
        return reply


punctual = client_app(task.model, task.data, task.algorithm, folder=task.folder)
app = Straggler()
