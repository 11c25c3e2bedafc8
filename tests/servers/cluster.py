"""Brokers that share a journal, each in a process of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servers.embedded import SETTINGS
from servers.processes import pause_process

from epochal.broker.broker import Broker
from epochal.broker.core.entries import SegmentKnown
from epochal.broker.core.settings import Settings
from epochal.broker.embedded import BrokerProcess
from epochal.broker.shared.status import cluster_status
from epochal.broker.storage import codec
from epochal.broker.storage.disk import RealDisk
from epochal.broker.storage.store import Store

WITHIN_S = 60.0


class BrokerCluster:
    def __init__(
        self,
        folder: Path,
        journal: str,
        names: str = "ab",
        options: Mapping[str, Any] | None = None,
        **cluster: Any,
    ) -> None:
        """`options` are those of `serve`, the others those of a member."""
        self.folder = folder
        self.journal = journal
        self._options = {"settings": SETTINGS, **(options or {})}
        self.members = {name: self._member(name, cluster) for name in names}

    def _member(self, name: str, cluster: dict[str, Any]) -> BrokerProcess:
        host = self._options.get("host", "127.0.0.1")
        own = {"journal": self.journal, "member": name, "advertised": f"{host}:0"}
        return BrokerProcess(self.folder / name, cluster={**own, **cluster}, **self._options)

    @property
    def bootstrap(self) -> str:
        return ",".join(member.address for member in self.members.values())

    def start(self) -> None:
        for member in self.members.values():
            member.start()
        self.active()

    def active(self) -> str:
        """The name of the active member, once there is one."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            members = cluster_status(self.journal).members
            found = [one.member for one in members if one.role == "active"]
            if len(found) == 1:
                return found[0]
            time.sleep(0.05)
        raise AssertionError("the cluster has no active member")

    def kill(self, name: str) -> None:
        self.members[name].kill()

    def pause(self, name: str) -> None:
        pause_process(self.members[name].pid)

    def resume(self, name: str) -> None:
        os.kill(self.members[name].pid, signal.SIGCONT)

    def kill_all(self) -> None:
        """Sooner than one could take over from another."""
        for member in self.members.values():
            os.kill(member.pid, signal.SIGKILL)
        for member in self.members.values():
            member.kill()

    def stop(self) -> None:
        for member in self.members.values():
            member.stop()

    def wait_until_equal(self) -> None:
        """All members have taken in the whole journal."""
        deadline = time.monotonic() + WITHIN_S
        while time.monotonic() < deadline:
            status = cluster_status(self.journal)
            if len(status.members) == len(self.members) and all(
                one.lag == 0 for one in status.members
            ):
                return
            time.sleep(0.05)
        raise AssertionError(f"members differ: {cluster_status(self.journal)}")

    def contents(self, name: str) -> tuple[list[bytes], dict[int, bytes]]:
        """What a stopped member holds: its state, and the bytes of every partition."""
        disk = RealDisk(self.folder / name)
        try:
            store = Store(disk)
            broker = Broker(Settings(), store, 0, is_member=True)
            entries = [one for one in broker.state.known() if not isinstance(one, SegmentKnown)]
            records = {}
            for number, log in store.logs.items():
                partition = broker.state.topics.partitions[number]
                found, at = [], partition.log_start
                while at < partition.end:
                    chunk = log.read(at, partition.end, 1 << 30)
                    found.append(chunk.data)
                    at = chunk.before
                records[number] = b"".join(found)
            store.close()
        finally:
            disk.close()
        parts: list[Any] = []
        for entry in entries:
            codec.put(entry, parts)
        return sorted(bytes(part) for part in parts), records


@contextmanager
def broker_cluster(
    folder: Path, journal: str, names: str = "ab", **cluster: Any
) -> Iterator[BrokerCluster]:
    found = BrokerCluster(folder, journal, names, **cluster)
    try:
        found.start()
        yield found
    finally:
        for member in found.members.values():
            if member.pid > 0:
                os.kill(member.pid, signal.SIGCONT)
                member.kill()
