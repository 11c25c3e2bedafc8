"""
Ports for servers that are killed and started again on the same one.

Not from the range that the kernel hands out to clients: while a server is down, a client's end of
some other connection could be given its port.

A port stays with the process that got it: between the look and the server's own bind lie seconds,
in which another test process could be given it too, and its server's first client would find ours.
The port's UDP half, which no server here uses, is bound as long as the process lives. A process
that can't bind it looks elsewhere, and the kernel takes it back from a process that was killed.
"""

from __future__ import annotations

import atexit
import random
import socket

_RANGE = range(15_000, 32_000)
_TRIES = 100

_leases: list[socket.socket] = []


def free_port(host: str = "127.0.0.1") -> int:
    for _ in range(_TRIES):
        port = random.choice(_RANGE)
        lease = _leased(host, port)
        if lease is not None:
            _leases.append(lease)
            return port
    raise RuntimeError(f"no free port between {_RANGE.start} and {_RANGE.stop} on {host}")


def _leased(host: str, port: int) -> socket.socket | None:
    lease = socket.socket(type=socket.SOCK_DGRAM)
    try:
        lease.bind((host, port))
        with socket.socket() as probe:
            probe.bind((host, port))
    except OSError:
        lease.close()
        return None
    return lease


@atexit.register
def _give_back() -> None:
    for lease in _leases:
        lease.close()
