"""`serve`: the receiver as a process, and who may send requests to it."""

from __future__ import annotations

import hmac
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from epochal.errors import Misconfigured, not_installed
from epochal.receiver.handlers import Handler
from epochal.receiver.store import Database, Store

try:
    import uvicorn

    from epochal.receiver.app import make_app
except ImportError as error:
    raise not_installed("the receiver", error.name, "receiver") from error

_FILE = "receiver.sqlite"
_DRAIN_S = 5
_IDLE_S = 75
"""Longer than clients keep an idle connection: the client must be the one to close it, or it sends
a request to a socket that is just being closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may send requests, and how large they may be."""

    tokens: tuple[bytes, ...] = field(default=(), repr=False)
    """Bearer tokens, any of which is accepted; none where every request is."""
    body_bytes_max: int = 64 * 1024 * 1024

    def allows(self, authorization: str) -> bool:
        if not self.tokens:
            return True
        scheme, _, given = authorization.partition(" ")
        shown = given.strip().encode() if scheme.lower() == "bearer" else b""
        # All of them are compared, so that the time taken reveals nothing.
        matches = [hmac.compare_digest(shown, token) for token in self.tokens]
        return any(matches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: Path
    key: Path
    client_ca: Path | None = None
    """Ask clients for a certificate of this authority."""


def serve(
    data: Path,
    *,
    host: str,
    port: int,
    access: Access,
    tls: Tls | None = None,
    handler: Handler | None = None,
    keeps_rows: bool = True,
    ready: Callable[[str], None],
) -> None:
    """Serve until a signal comes. `ready` is called with the address once it can be reached."""
    _require_guarded(host, access, tls)
    database = Database(data / _FILE)
    store = Store(database, handler=handler, keeps_rows=keeps_rows)
    config = uvicorn.Config(
        make_app(store, access),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=_IDLE_S,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else str(tls.key),
        ssl_ca_certs=None if tls is None or tls.client_ca is None else str(tls.client_ca),
        ssl_cert_reqs=(
            ssl.CERT_NONE if tls is None or tls.client_ca is None else ssl.CERT_REQUIRED
        ),
    )
    try:
        _Server(config, lambda at: ready(f"{'http' if tls is None else 'https'}://{at}")).run()
    finally:
        database.close()


class _Server(uvicorn.Server):
    """Reports the address it listens on: with port 0 that is known only after the start."""

    def __init__(self, config: uvicorn.Config, report: Callable[[str], None]) -> None:
        super().__init__(config)
        self._report = report

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._report(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def _require_guarded(host: str, access: Access, tls: Tls | None) -> None:
    is_authenticated = bool(access.tokens) or (tls is not None and tls.client_ca is not None)
    if not _is_loopback(host) and not is_authenticated:
        raise Misconfigured(
            f"the receiver would listen on {host} without asking for credentials",
            "give it --token-file, or --certificate, --key and --client-ca; or listen on 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
