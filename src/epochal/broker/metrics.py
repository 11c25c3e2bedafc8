"""Metrics of a broker in the text format of Prometheus, and a small HTTP server for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping

from epochal.broker.acceptor import Acceptor
from epochal.broker.core.settings import LIMITS
from epochal.broker.tick_loop import TickLoop

_REQUEST_WITHIN_S = 5.0
_REQUEST_BYTES_MAX = 1 << 14


def render(ticks: TickLoop, acceptor: Acceptor, member: Mapping[str, int] | None = None) -> str:
    """`member`: what a member of a cluster counts."""
    lines = [*_lines(ticks, acceptor), *_member_lines(member or {})]
    return "".join(f"{line}\n" for line in lines)


_OF_MEMBERS: Mapping[str, tuple[str, str]] = {
    "active": ("gauge", "1 on the member that is the active, 0 on standbys."),
    "since_seconds": ("gauge", "When this member took its role, in seconds since 1970."),
    "standby_lag": ("gauge", "On the active: how many slots each standby has still to take in."),
    "generation": ("gauge", "How often a member has taken over, in all."),
    "slot": ("gauge", "The newest slot of the shared journal that this member has taken in."),
    "snapshot": ("gauge", "The slot of the newest snapshot that this member knows of."),
    "takeovers_total": ("counter", "How often this member has become the active."),
    "fenced_total": ("counter", "How often another member took over from this one."),
    "throttled_total": ("counter", "Ticks that this active delayed, as all standbys were behind."),
    "snapshots_total": ("counter", "Snapshots of the shared journal that this member wrote."),
}


def _member_lines(member: Mapping[str, int]) -> Iterator[str]:
    described = ""
    for labelled, value in member.items():
        name = labelled.partition("{")[0]
        if name != described:
            kind, meaning = _OF_MEMBERS[name]
            yield f"# HELP epochal_broker_member_{name} {meaning}"
            yield f"# TYPE epochal_broker_member_{name} {kind}"
            described = name
        yield f"epochal_broker_member_{labelled} {value}"


def _lines(ticks: TickLoop, acceptor: Acceptor) -> Iterator[str]:
    broker = ticks.broker
    state = broker.state
    gauges = {
        "connections": ("open connections, handshakes included", acceptor.connections),
        "connections_before_login": ("those that have not logged in", ticks.before_login),
        "handshakes": ("TLS handshakes under way", acceptor.handshakes),
        "frames_bytes": ("requests received and not handled yet", ticks.held_bytes),
        "topics": ("topics", len(state.topics.by_name)),
        "partitions": ("partitions", len(state.topics.partitions)),
        "groups": ("consumer groups", len(state.groups)),
        "open_transactions": ("transactions under way", len(broker.open_transactions())),
    }
    for name, (meaning, value) in gauges.items():
        yield f"# HELP epochal_broker_{name} {meaning[0].upper()}{meaning[1:]}."
        yield f"# TYPE epochal_broker_{name} gauge"
        yield f"epochal_broker_{name} {value}"
    yield "# HELP epochal_broker_requests_total Requests that were handled."
    yield "# TYPE epochal_broker_requests_total counter"
    yield f"epochal_broker_requests_total {ticks.requests}"
    yield "# HELP epochal_broker_damaged_batches_total Batches that failed their checksum."
    yield "# TYPE epochal_broker_damaged_batches_total counter"
    yield f"epochal_broker_damaged_batches_total {broker.damaged_batches}"
    yield "# HELP epochal_broker_limit The value of a limit, in the unit that its name ends with."
    yield "# TYPE epochal_broker_limit gauge"
    for limit in LIMITS:
        yield f'epochal_broker_limit{{limit="{limit}"}} {getattr(broker.settings, limit)}'
    yield "# HELP epochal_broker_limit_reached_total How often a limit was reached."
    yield "# TYPE epochal_broker_limit_reached_total counter"
    for limit, count in broker.limits_reached.items():
        yield f'epochal_broker_limit_reached_total{{limit="{limit}"}} {count}'


async def serve_metrics(host: str, port: int, text: Callable[[], str]) -> asyncio.Server:
    """Answer every request with the metrics, whatever its path."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_WITHIN_S):
                await reader.readuntil(b"\r\n\r\n")
                body = text().encode()
                head = (
                    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        finally:
            writer.close()

    return await asyncio.start_server(answer, host, port, limit=_REQUEST_BYTES_MAX)
