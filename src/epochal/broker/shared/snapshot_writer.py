"""`SnapshotWriter`: the snapshots that a member writes, while slots go on being filled."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from epochal.broker.core.partitions import Partition
from epochal.broker.shared import snapshots
from epochal.broker.shared.journal import SharedJournal
from epochal.broker.shared.snapshots import RecordObject, Snapshot
from epochal.broker.storage import codec
from epochal.broker.tick_loop import TickLoop
from epochal.errors import EpochalError

_LOOK_S = 0.5
_ACTIVE_WAITS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLimits:
    """How much of the journal there may be behind the newest snapshot."""

    slots: int = 20_000
    bytes: int = 64 << 20


class Snapshotted(Protocol):
    """The member, as it is at the moment."""

    ticks: TickLoop

    @property
    def is_active(self) -> bool: ...

    @property
    def slot(self) -> int: ...


class _Moved(Exception):
    """What a snapshot was made of is not there any more: the next attempt has what is."""


class SnapshotWriter:
    def __init__(self, limits: SnapshotLimits) -> None:
        self._limits = limits
        self._settled = asyncio.Event()
        self._taken_bytes = 0
        self.newest = 0
        """The slot of the newest snapshot that is known here."""
        self.written = 0

    def take_in(self, size: int) -> None:
        """So many bytes of ticks have come since the newest snapshot."""
        self._taken_bytes += size

    def tick_ended(self) -> None:
        """A tick of the active has ended; the next one is not decided yet."""
        self._settled.set()

    def loaded(self, number: int) -> None:
        self.newest = max(self.newest, number)

    async def keep_writing(self, member: Snapshotted, journal: SharedJournal) -> None:
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                try:
                    if self._is_due(member) and await self._write(member.ticks, journal):
                        self.written += 1
                        await asyncio.to_thread(journal.prune)
                except (EpochalError, _Moved) as error:
                    member.ticks.log(f"no snapshot: {error}", "snapshot")
        finally:
            journal.close()

    def _is_due(self, member: Snapshotted) -> bool:
        """The active waits for longer: it does it only where no standby does."""
        times = _ACTIVE_WAITS if member.is_active else 1.0
        slots = member.slot - self.newest
        return slots >= self._limits.slots * times or (
            self._taken_bytes >= self._limits.bytes * times
        )

    async def _write(self, ticks: TickLoop, journal: SharedJournal) -> bool:
        newest = max(await asyncio.to_thread(journal.snapshot_numbers), default=0)
        if newest > self.newest:
            self.newest, self._taken_bytes = newest, 0
            return False
        base = await asyncio.to_thread(journal.snapshot, newest) if newest else None
        broker = ticks.broker
        is_settled = await self._is_settled(ticks)
        position = broker.store.position
        if not is_settled or position is None or position.number <= newest:
            return False
        state = codec.packed(broker.state.known())
        taken_bytes = self._taken_bytes
        ends = [(one, one.log_start, one.end) for one in broker.state.topics.partitions.values()]
        known = snapshots.by_partition(base.objects if base else ())
        objects: list[RecordObject] = []
        for partition, log_start, end in ends:
            kept = snapshots.kept_objects(known.get(partition.number, ()), log_start, end)
            since = range(kept[-1].end if kept else log_start, end)
            objects += kept
            objects += await self._put_records(journal, position.number, ticks, partition, since)
        # The start of a log may have moved in a tick that does not get into its slot.
        if not await self._is_settled(ticks):
            return False
        await asyncio.to_thread(journal.put_snapshot, Snapshot(position, state, objects))
        self.newest = position.number
        self._taken_bytes -= taken_bytes
        return True

    async def _is_settled(self, ticks: TickLoop) -> bool:
        """Wait until all that was decided is in slots; False where that will never be."""
        while not ticks.is_over and (ticks.is_syncing or ticks.broker.store.has_pending):
            self._settled.clear()
            await self._settled.wait()
        return not ticks.is_over

    async def _put_records(
        self,
        journal: SharedJournal,
        number: int,
        ticks: TickLoop,
        partition: Partition,
        offsets: range,
    ) -> list[RecordObject]:
        """
        Records of a partition, as objects of the snapshot of this slot. Those that were deleted
        since are left out: the slot that says so is behind the snapshot, and a member that begins
        from the snapshot reads that slot before it serves.
        """
        made: list[RecordObject] = []
        at, end = offsets.start, offsets.stop
        while at < end:
            is_settled = await self._is_settled(ticks)
            log = ticks.broker.store.logs.get(partition.number)
            if not is_settled or log is None:
                raise _Moved(f"partition {partition.number} is gone")
            at = max(at, partition.log_start)
            if at >= end or not (chunk := log.read(at, end, snapshots.OBJECT_BYTES_MAX)).data:
                break
            data = chunk.data
            one = snapshots.record_object(number, partition.number, at, chunk.before, data)
            await asyncio.to_thread(journal.put_object, one, data)
            made.append(one)
            at = chunk.before
        return made
