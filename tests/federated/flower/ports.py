"""Ports on 127.0.0.1 that neither another test run nor another program is about to take."""

import os
import random
import socket

_FIRST, _LAST = 20000, 32000
"""Below the range from which the kernel draws ports for outgoing connections."""


def free_port() -> int:
    """Return a port of this machine on which nobody listens."""
    # Not random.choice: tests seed that, and two runs must not draw the same ports.
    draw = random.Random(os.urandom(8))
    while True:
        port = draw.randrange(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def listens(port: int) -> bool:
    """Return True if somebody listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
