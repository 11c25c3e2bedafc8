"""`serve`: a broker on a socket, until a signal; `running`: the same within an event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import ssl
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epochal.broker.acceptor import Acceptor
from epochal.broker.broker import Address, Broker
from epochal.broker.connection import Connection
from epochal.broker.core.settings import Settings
from epochal.broker.metrics import render, serve_metrics
from epochal.broker.sasl import MECHANISMS, Login, Users
from epochal.broker.storage.disk import RealDisk
from epochal.broker.storage.store import Store
from epochal.broker.tick_loop import TickLoop
from epochal.clock import SystemClock
from epochal.errors import Misconfigured
from epochal.storage.local import disk_hint
from epochal.storage.urls import scheme_of

_SYNC_LOOK_S = 0.002
_SWITCH_S = 0.001
_CERTIFICATE_LOOK_S = 5.0

_FOLDER = "--data names a folder that this process can make and write to"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Where to listen, and who may connect."""

    host: str = "127.0.0.1"
    port: int = 9092
    """0: any free port."""
    advertised_host: str | None = None
    """The host that clients connect to, if not `host`."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name → password. If there are any, every client must authenticate by SASL."""
    mechanisms: Sequence[str] = MECHANISMS
    certificate_file: str | None = None
    """PEM, with the chain and, unless there is a key file, the key: every client uses TLS."""
    key_file: str | None = None
    client_ca_file: str | None = None
    """PEM: clients need a certificate signed by one of these."""
    metrics_port: int | None = None
    """Where Prometheus reads metrics, on the loopback interface."""

    def check(self) -> None:
        """Raise where everyone could connect."""
        for mechanism in self.mechanisms:
            if mechanism not in MECHANISMS:
                raise Misconfigured(
                    f"{mechanism} is no mechanism of this broker", f"one of {', '.join(MECHANISMS)}"
                )
        if self.users or self.certificate_file or _is_loopback(self.host):
            return
        raise Misconfigured(
            f"{self.host} can be reached from other machines, and no client would be authenticated",
            hint="listen on 127.0.0.1, or set users (SASL, --users FILE) or a certificate (TLS, "
            "--certificate and --key)",
        )

    def context(self) -> ssl.SSLContext | None:
        if self.certificate_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate_file, self.key_file, password="")
            if self.client_ca_file is not None:
                context.load_verify_locations(self.client_ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise Misconfigured(
                f"TLS files can't be used: {error}", "PEM files that this process can read"
            ) from None
        return context

    def tls_files(self) -> list[tuple[int, int] | None]:
        """When each was written, and which file it is: renewals replace them."""
        paths = filter(None, (self.certificate_file, self.key_file, self.client_ca_file))
        found: list[tuple[int, int] | None] = []
        for path in map(Path, paths):
            try:
                stat = path.stat()
            except OSError:
                found.append(None)
            else:
                found.append((stat.st_mtime_ns, stat.st_ino))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What makes a broker a member of a cluster."""

    journal: str
    """The URL of the store that all members share."""
    member: str
    """The name of this member, its own for life."""
    advertised: str
    """host:port under which clients reach this member."""
    segments: str = ""
    """The URL of a store for the records of snapshots, if not that of the journal."""
    snapshot_slots: int = 20_000
    snapshot_bytes: int = 64 << 20
    """With so many slots or bytes behind the newest snapshot, another is written."""
    peer_port: int = 0
    """Where other members ask how it is; 0: any free port."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def running(
    data_dir: str | Path,
    listener: Listener,
    settings: Settings,
    *,
    fsync: bool = True,
    fail: Callable[[BaseException], None] | None = None,
) -> AsyncIterator[Address]:
    """A broker for the length of a block. `fail` is called with an error that ends it."""
    listener.check()
    context = listener.context()
    users = Users(listener.users, listener.mechanisms) if listener.users else None
    disk = RealDisk(Path(data_dir))
    store = Store(
        disk,
        is_synced=fsync,
        segment_bytes_max=settings.segment_bytes,
        segment_ms_max=settings.segment_ms,
    )
    ticks: TickLoop | None = None
    try:
        broker = Broker(settings, store, time.time_ns() // 1_000_000)

        def connect() -> Connection:
            if ticks is None:
                raise ConnectionRefusedError
            return Connection(ticks, None if users is None else Login(users))

        acceptor = Acceptor(connect, settings, context, broker.limit_reached)
        port = await acceptor.bind(listener.host, listener.port)
        shown = listener.advertised_host or listener.host
        is_any = listener.advertised_host is None and shown in ("0.0.0.0", "::", "")  # noqa: S104
        address = Address(host=shown, port=port)
        ticks = TickLoop(
            broker, advertised=address, has_fixed_host=not is_any, fail=fail or _ignore
        )
        for note in store.notes:
            ticks.log(note)
        acceptor.start()
        loop = ticks
        metrics = await _metrics(listener, lambda: render(loop, acceptor))
        try:
            async with _renewing(listener, acceptor, ticks.log):
                yield address
        finally:
            acceptor.close()
            if metrics is not None:
                metrics.close()
        ticks.close()
        while ticks.is_syncing:
            await asyncio.sleep(_SYNC_LOOK_S)
        store.roll(broker.state.known())
    finally:
        store.close()
        disk.close()


@asynccontextmanager
async def running_member(
    data_dir: str | Path,
    listener: Listener,
    settings: Settings,
    cluster: Cluster,
    *,
    fail: Callable[[BaseException], None],
) -> AsyncIterator[Address]:
    """A member of a cluster for the length of a block, which begins once it can be connected to."""
    # Here: a broker alone needs none of these.
    from epochal.broker.shared.journal import MemberRecord, SharedJournal  # noqa: PLC0415
    from epochal.broker.shared.member import ClusterMember  # noqa: PLC0415
    from epochal.broker.shared.peers import serve_status  # noqa: PLC0415
    from epochal.broker.shared.snapshot_writer import SnapshotLimits  # noqa: PLC0415

    listener.check()
    context = listener.context()
    users = Users(listener.users, listener.mechanisms) if listener.users else None
    node_id = zlib.crc32(cluster.member.encode()) & 0x7FFF_FFFF
    settings = replace(settings, node_id=node_id)
    host, port = _advertised(cluster)
    clock = SystemClock()
    if scheme_of(cluster.journal) in {"etcd", "etcds"} and not cluster.segments:
        raise Misconfigured(
            "an etcd is too small for the records of a broker",
            "--segments with a folder that all members share, an object store or a database",
        )
    journal = SharedJournal(cluster.journal, clock, cluster.segments)
    disk = RealDisk(Path(data_dir))
    try:
        secret = await asyncio.to_thread(journal.make_secret)
        await asyncio.to_thread(journal.require_own_segments, secret)
        doubts = await asyncio.to_thread(journal.doubts)
        member = ClusterMember(
            disk,
            settings,
            journal,
            name=cluster.member,
            clock=clock,
            fail=fail,
            limits=SnapshotLimits(slots=cluster.snapshot_slots, bytes=cluster.snapshot_bytes),
        )
        for doubt in doubts:
            member.ticks.log(f"{journal.location}: {doubt}")
        peers = await serve_status(listener.host, cluster.peer_port, secret, member.status)

        def connect() -> Connection:
            return Connection(member.ticks, None if users is None else Login(users))

        def limit_reached(limit: str) -> None:
            member.ticks.limit_reached(limit)

        acceptor = Acceptor(connect, settings, context, limit_reached)
        try:
            await member.caught_up(secret)
            bound = await acceptor.bind(listener.host, listener.port)
            address = Address(host=host, port=port or bound)
            record = MemberRecord(
                member=cluster.member,
                node_id=node_id,
                host=address.host,
                port=address.port,
                peer_host=host,
                peer_port=peers.sockets[0].getsockname()[1],
            )
            await member.join(record)
            acceptor.start()
            metrics = await _metrics(
                listener, lambda: render(member.ticks, acceptor, member.counts())
            )
            try:
                async with _renewing(listener, acceptor, member.ticks.log):
                    yield address
            finally:
                if metrics is not None:
                    metrics.close()
        finally:
            acceptor.close()
            peers.close()
            await member.close()
    finally:
        disk.close()


def _advertised(cluster: Cluster) -> tuple[str, int]:
    host, _, port = cluster.advertised.rpartition(":")
    if not host or not port.isdigit():
        raise Misconfigured(f"--advertise {cluster.advertised}: no address", "host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


@asynccontextmanager
async def _renewing(
    listener: Listener, acceptor: Acceptor, log: Callable[[str], None]
) -> AsyncIterator[None]:
    """For the length of a block, certificates that are renewed are used for new connections."""

    async def look() -> None:
        seen = listener.tls_files()
        while True:
            await asyncio.sleep(_CERTIFICATE_LOOK_S)
            found = listener.tls_files()
            if found == seen:
                continue
            try:
                acceptor.context = listener.context()
            except Misconfigured as error:
                # A key may still have to follow its certificate.
                log(f"{error.message}: those before are used")
            else:
                seen = found
                log("renewed TLS files are used from here on")

    if listener.certificate_file is None:
        yield
        return
    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()


async def _metrics(listener: Listener, text: Callable[[], str]) -> asyncio.Server | None:
    if listener.metrics_port is None:
        return None
    host, port = "127.0.0.1", listener.metrics_port
    try:
        return await serve_metrics(host, port, text)
    except OSError as error:
        raise Misconfigured(
            f"no metrics on {host}:{port}: {error.strerror}", "give another port"
        ) from error


def _ignore(_: BaseException) -> None:
    """Requests of the block fail then."""


async def _serve(
    data_dir: str | Path,
    listener: Listener,
    settings: Settings,
    *,
    fsync: bool,
    cluster: Cluster | None,
    ready: Callable[[str], None],
) -> None:
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def stop() -> None:
        if not over.done():
            over.set_result(None)

    def fail(error: BaseException) -> None:
        if not over.done():
            over.set_exception(error)

    for number in (signal.SIGTERM, signal.SIGINT):
        # One that the caller ignores stays ignored: shells do that for background jobs.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop)
    try:
        if cluster is None:
            block = running(data_dir, listener, settings, fsync=fsync, fail=fail)
        else:
            block = running_member(data_dir, listener, settings, cluster, fail=fail)
        await _until(over, block, ready)
    except OSError as error:
        raise Misconfigured(
            f"the broker has stopped: its folder {data_dir} can't be used: {error.strerror}",
            hint=f"{disk_hint(error) or _FOLDER}; acknowledged records are kept",
        ) from error


async def _until(
    over: asyncio.Future[None],
    block: AbstractAsyncContextManager[Address],
    ready: Callable[[str], None],
) -> None:
    """Run a broker until `over`, which may come before it is ready: a member takes its time."""
    is_ready = False

    async def run() -> None:
        nonlocal is_ready
        async with block as address:
            is_ready = True
            host = f"[{address.host}]" if ":" in address.host else address.host
            ready(f"{host}:{address.port}")
            await over

    task = asyncio.create_task(run())
    await asyncio.wait({task, over}, return_when=asyncio.FIRST_COMPLETED)
    if not is_ready:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def serve(
    data_dir: str | Path,
    host: str = "127.0.0.1",
    port: int = 9092,
    *,
    advertised_host: str | None = None,
    fsync: bool = True,
    users: Mapping[str, str] | None = None,
    mechanisms: Sequence[str] = MECHANISMS,
    certificate_file: str | None = None,
    key_file: str | None = None,
    client_ca_file: str | None = None,
    metrics_port: int | None = None,
    settings: Settings | None = None,
    cluster: Mapping[str, Any] | None = None,
    ready: Callable[[str], None] = lambda _address: None,
) -> None:
    """
    Run a broker until SIGTERM or a SIGINT that is not ignored. `ready` is called with its address
    once it can be used. Without `fsync`, for tests and demos, a power cut may lose what was
    acknowledged; a crash of the process loses nothing in either case.

    Raises `Misconfigured` where the folder is in use, the address is taken or open to everyone, or
    the disk refuses a write: the broker has then stopped, and all acknowledged records are in the
    folder.
    """
    listener = Listener(
        host=host,
        port=port,
        advertised_host=advertised_host,
        users=users or {},
        mechanisms=mechanisms,
        certificate_file=certificate_file,
        key_file=key_file,
        client_ca_file=client_ca_file,
        metrics_port=metrics_port,
    )
    # A thread beside the loop gives way to it after this time.
    sys.setswitchinterval(_SWITCH_S)
    asyncio.run(
        _serve(
            data_dir,
            listener,
            settings or Settings(),
            fsync=fsync,
            cluster=None if cluster is None else Cluster(**cluster),
            ready=ready,
        )
    )
