r"""The ledger of what each client has added to the server's memory, so that it can be removed.

The server's memory is a sum over the clients, such as \(\Pi = \sum_i \alpha_i \pi_i\), and a lie
stays in it for good. So the server keeps every client's \(\pi_i\), the sum of its accepted updates.
This costs a copy of the model for each client.
"""

from dataclasses import replace

from torchpisa.federated.algorithms.base import Fields, ServerState

__all__ = ["Ledger", "without_contribution"]


class Ledger:
    """The sums of each client's updates.

    Args:
        sums: earlier sums by client, to continue from.
    """

    def __init__(self, sums: dict[str, Fields] | None = None) -> None:
        self.sums: dict[str, Fields] = {} if sums is None else sums

    def add(self, name: str, contribution: Fields) -> None:
        """Add the contribution of an update of client `name`."""
        known = self.sums.setdefault(name, {})
        for kind, tensors in contribution.items():
            if kind in known:
                known[kind] = {key: known[kind][key] + tensor for key, tensor in tensors.items()}
            else:
                known[kind] = {key: tensor.clone() for key, tensor in tensors.items()}

    def remove(self, name: str) -> Fields:
        """Remove a client and return its contributions."""
        return self.sums.pop(name, {})


def without_contribution(
    server: ServerState, contribution: Fields, samples: float, before: float, after: float
) -> ServerState:
    r"""Return the server without the contributions of a client.

    Args:
        server: the server with them.
        contribution: the client's \(\pi_i\); empty if none of its updates was accepted.
        samples: the number of samples of the client, \(n_i\).
        before: the number of samples of all clients so far, \(n\).
        after: the number from now on: \(n - n_i\) if the client leaves, \(n\) if it starts again.
    """
    memory: Fields = {}
    for kind, tensors in server.memory.items():
        contributed = contribution.get(kind, {})
        memory[kind] = {}
        for key, tensor in tensors.items():
            # In float64, because the difference may be much smaller than both terms.
            rest = before * tensor.double()
            if key in contributed:
                rest = rest - samples * contributed[key].double()
            memory[kind][key] = (
                (rest / after).to(tensor.dtype) if after else tensor.new_zeros(tensor.shape)
            )
    return replace(server, memory=memory)
