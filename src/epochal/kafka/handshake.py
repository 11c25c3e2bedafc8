"""`connect`: a connection ready for use: dial the address, ask for versions, authenticate."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from functools import cache

from epochal.clock import Clock
from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka import errors, versions
from epochal.kafka.cluster import Address
from epochal.kafka.codes import Code
from epochal.kafka.connection import Answer, Connection, Limits, Pending, dial
from epochal.kafka.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from epochal.kafka.messages.sasl_authenticate import SaslAuthenticateRequest
from epochal.kafka.messages.sasl_handshake import SaslHandshakeRequest
from epochal.kafka.primitives import Malformed, Request
from epochal.kafka.security import Mechanism, Security

SOFTWARE = "epochal"
_SESSION_PART_USED = 0.85
"""A session is replaced before its end, so that the broker does not end it during a request."""


class Link:
    """A connection that is ready for use, with the versions and features of its broker."""

    def __init__(self, connection: Connection, about: ApiVersionsResponse) -> None:
        self.connection = connection
        self.versions: Mapping[int, tuple[int, int]] = {
            api.api_key: (api.min_version, api.max_version) for api in about.api_keys
        }
        self.features_epoch = about.finalized_features_epoch
        self.features: Mapping[str, int] = {
            feature.name: feature.max_version_level for feature in about.finalized_features
        }
        self.expires_at = float("inf")

    def send(
        self,
        request: Request[Answer],
        *,
        transaction_version: int,
        timeout_s: float | None = None,
        version_max: int | None = None,
    ) -> Pending[Answer]:
        version = versions.choose(
            request,
            self.versions,
            transaction_version=transaction_version,
            version_max=version_max,
        )
        return self.connection.send(request, version, timeout_s=timeout_s)


def connect(
    address: Address,
    *,
    security: Security,
    context: ssl.SSLContext | None,
    client_id: str,
    clock: Clock,
    limits: Limits,
) -> Link:
    """
    A link to the broker at an address. Raises `TryAgain` or `Misconfigured`; no request of the
    caller was sent then.
    """
    started = clock.monotonic()
    sock = dial(address.host, address.port, context, limits.connect_timeout_s)
    connection = Connection(
        sock, peer=str(address), client_id=client_id, clock=clock, limits=limits
    )
    left = max(limits.connect_timeout_s - (clock.monotonic() - started), 0.1)
    try:
        link = Link(connection, _ask_versions(connection, left))
        if security.sasl is not None:
            _authenticate(link, security.sasl, clock, left)
    except OutcomeUnknown as error:
        connection.close()
        if isinstance(connection.cause, (Misconfigured, Malformed)):
            raise connection.cause from error
        raise TryAgain(error.message, closed_hint(security)) from error
    except BaseException:
        connection.close()
        raise
    return link


def closed_hint(security: Security) -> str:
    """Brokers close a connection with the wrong security without an answer."""
    lacking = [
        option
        for option, part in (
            ("username= and password=", security.sasl),
            ("tls=True", security.tls),
        )
        if part is None
    ]
    if lacking:
        wanted = ", or ".join(lacking)
        return f"a listener that wants SASL or TLS closes connections without: {wanted}"
    return ""


@cache
def _software_version() -> str:
    """Our own version, in the few characters that brokers allow for it."""
    from importlib import metadata  # noqa: PLC0415  27 ms that not every process needs

    try:
        version = metadata.version(SOFTWARE)
    except metadata.PackageNotFoundError:
        version = "0"
    return re.sub(r"[^A-Za-z0-9.-]", "-", version)


def _ask_versions(connection: Connection, timeout_s: float) -> ApiVersionsResponse:
    request = ApiVersionsRequest(
        client_software_name=SOFTWARE, client_software_version=_software_version()
    )
    newest = ApiVersionsRequest.VERSIONS[-1]
    pending = connection.send(request, newest, timeout_s=timeout_s)
    frame = pending.wait()
    # A broker that does not know the version answers so in the format of version 0.
    if int.from_bytes(frame[4:6], "big", signed=True) == Code.UNSUPPORTED_VERSION:
        about = ApiVersionsResponse.decode(0, frame, 4)
        high = next((api.max_version for api in about.api_keys if api.api_key == 18), 0)
        answer = connection.send(request, min(high, newest), timeout_s=timeout_s).result()
    else:
        answer = pending.result()
    errors.require_ok(answer.error_code, f"asking {connection.peer} for its versions")
    return answer


def _authenticate(link: Link, mechanism: Mechanism, clock: Clock, timeout_s: float) -> None:
    peer = link.connection.peer

    def ask(request: Request[Answer]) -> Answer:
        return link.send(request, transaction_version=0, timeout_s=timeout_s).result()

    offered = ask(SaslHandshakeRequest(mechanism=mechanism.name))
    if offered.error_code == Code.UNSUPPORTED_SASL_MECHANISM:
        raise Misconfigured(
            f"{peer} does not offer {mechanism.name}, only {', '.join(offered.mechanisms)}",
            "choose one of these, or enable it on the brokers (sasl.enabled.mechanisms)",
        )
    errors.require_ok(offered.error_code, f"SASL handshake with {peer}")
    exchange = mechanism.exchange()
    message = next(exchange)
    while True:
        answer = ask(SaslAuthenticateRequest(auth_bytes=message))
        about = f"authenticating with {peer} by {mechanism.name}"
        errors.require_ok(answer.error_code, about, answer.error_message)
        try:
            message = exchange.send(answer.auth_bytes)
        except StopIteration:
            break
        except UnicodeDecodeError:
            raise Misconfigured(
                f"{about}: the broker's answer can't be read",
                "is this the address of a Kafka listener with SASL?",
            ) from None
    if answer.session_lifetime_ms > 0:
        lifetime_s = answer.session_lifetime_ms / 1000
        link.expires_at = clock.monotonic() + lifetime_s * _SESSION_PART_USED
