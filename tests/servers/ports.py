"""
Ports for servers that are killed and started again on the same one.

Not from the range that the kernel hands out to clients: while a server is down, a client's end of
some other connection could be given its port.
"""

from __future__ import annotations

import random
import socket

_RANGE = range(15_000, 32_000)
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    for _ in range(_TRIES):
        port = random.choice(_RANGE)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port between {_RANGE.start} and {_RANGE.stop} on {host}")
