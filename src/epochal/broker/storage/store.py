"""`Store`: keeps the entries that the broker's core emits, and recovers them after a crash.

The order of a tick:
    1. the core emits entries; batches are readable from that moment, no request is answered yet
    2. `commit`: partitions with much in memory write it to their segments, and the journal gets
       one frame with all entries, with `Placed` for batches that are in segments already
    3. `sync`, if power cuts must not lose anything: first the segments, then the journal
    4. answers are sent

So an answer is backed by a whole frame, and a frame never points at segment bytes that are not
there. What `commit` raises is final: memory is ahead of the disk, and the broker must stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from epochal.broker.core.entries import (
    Appended,
    Entry,
    LogStartMoved,
    PartitionKnown,
    Placed,
    SegmentKnown,
    SlotFilled,
    SlotTaken,
    TopicChanged,
    TopicDeleted,
)
from epochal.broker.core.state import BrokerState
from epochal.broker.storage import codec, journal
from epochal.broker.storage.disk import Disk
from epochal.broker.storage.journal import Frames, Journal
from epochal.broker.storage.segments import SEGMENT_MS_MAX, OpenFiles, PartitionLog, Segment
from epochal.errors import CorruptRecord
from epochal.kafka.primitives import Part

TAIL_BYTES_MAX = 1 << 17
"""A partition with more than this in memory writes it to its segment."""
_REST_BYTES_MAX = 1 << 14
"""A partition with less in memory has it in the snapshot: thousands of small files would have to be
synced otherwise, which takes seconds."""
JOURNAL_BYTES_MAX = 64 << 20
JOURNAL_ENTRIES_MAX = 200_000
"""Bounds the time a restart takes."""
_EVERY_OFFSET = (1 << 63) - 1


class Store:
    def __init__(
        self,
        disk: Disk,
        *,
        is_synced: bool = False,
        segment_bytes_max: int = 1 << 30,
        segment_ms_max: int = SEGMENT_MS_MAX,
        tail_bytes_max: int = TAIL_BYTES_MAX,
        journal_bytes_max: int = JOURNAL_BYTES_MAX,
        journal_entries_max: int = JOURNAL_ENTRIES_MAX,
    ) -> None:
        self.logs: dict[int, PartitionLog] = {}
        self.is_synced = is_synced
        self.missing_bytes = 0
        """Of segments, at the start: the disk has lost what was synced to it."""
        self.notes: list[str] = []
        """What recovery found that a person may want to know."""
        self._disk = disk
        self._files = OpenFiles(disk)
        self._tail_bytes_max = tail_bytes_max
        self._journal_bytes_max = journal_bytes_max
        self._journal_entries_max = journal_entries_max
        self._pending: list[Entry] = []
        self._touched: dict[int, PartitionLog] = {}
        self._written: list[PartitionLog] = []
        self._numbers: dict[str, list[int]] = {}
        self._segment_bytes_max = segment_bytes_max
        self._segment_ms_max = segment_ms_max
        self._removals: list[tuple[PartitionLog, list[Segment] | None]] = []
        self._entries = 0
        self.ticks = 0
        """Written since the start."""
        self._is_unsynced = False
        self.position: SlotTaken | None = None
        """Of a member of a cluster: how far it has taken in the shared journal."""
        self._journal: Journal | None = None

    @property
    def folder(self) -> str:
        return self._disk.folder

    def space(self) -> tuple[int, int]:
        return self._disk.space()

    # A tick

    def emit(self, entry: Entry) -> None:
        self._pending.append(entry)
        if isinstance(entry, Appended):
            log = self.logs[entry.partition]
            log.stage(entry.batch)
            if log.tail_bytes > self._tail_bytes_max:
                self._touched[log.number] = log
        elif isinstance(entry, (TopicChanged, TopicDeleted, LogStartMoved)):
            self._note(entry)

    def _note(self, entry: Entry) -> None:
        """Topics come and go, logs begin later."""
        match entry:
            case TopicChanged():
                self._numbers[entry.name] = entry.partitions
                segment_bytes = int(entry.configs.get("segment.bytes", self._segment_bytes_max))
                segment_ms = int(entry.configs.get("segment.ms", self._segment_ms_max))
                for number in entry.partitions:
                    log = self.logs.get(number)
                    if log is None:
                        log = self.logs[number] = PartitionLog(number, self._files)
                    log.segment_bytes_max, log.segment_ms_max = segment_bytes, segment_ms
            case TopicDeleted():
                for number in self._numbers.pop(entry.name, ()):
                    self._touched.pop(number, None)
                    self._removals.append((self.logs.pop(number), None))
            case LogStartMoved():
                log = self.logs[entry.partition]
                gone = log.drop_before(entry.offset)
                if gone:
                    self._removals.append((log, gone))
            case _:
                pass

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def needs_sync(self) -> bool:
        """Whether an answer has to wait for `sync`."""
        return self.is_synced and self._is_unsynced

    def commit(self) -> None:
        """Step 2 of a tick."""
        if self._pending and self._journal is not None:
            self._write(self.take())

    def take(self) -> list[Entry]:
        """The entries of a tick: what is emitted from now on belongs to the next one."""
        pending, self._pending = self._pending, []
        return pending

    def keep(self, entries: list[Entry], packed: Part, position: SlotTaken) -> None:
        """
        Step 2 of a tick that is in the shared journal up to this slot. `packed`: the same entries
        as bytes, or nothing where the slots have them otherwise.
        """
        before, self.position = self.position, position
        is_next = before is not None and before.generation == position.generation
        where = SlotFilled(position.number, position.crc) if is_next else position
        self._write(entries, packed, where)

    def take_in(self, state: BrokerState, payload: bytes, position: SlotTaken) -> None:
        """A tick that another member has decided: apply and keep it."""
        entries = list(codec.read(payload))
        for entry in entries:
            self._apply(state, entry)
            if isinstance(entry, Appended):
                log = self.logs.get(entry.partition)
                if log is not None and log.tail_bytes > self._tail_bytes_max:
                    self._touched[log.number] = log
        self.keep(entries, payload, position)

    def _write(self, pending: list[Entry], packed: Part = b"", *behind: Entry) -> None:
        if self._journal is None:
            return
        placed: dict[int, Placed] = {}
        if self._touched:
            for number, log in self._touched.items():
                where = self._flush(log)
                if where is not None:
                    placed[number] = where
            self._touched = {}
        parts: list[Part] = []
        if packed and not placed:
            parts.append(packed)
        else:
            for entry in pending:
                if not (placed and isinstance(entry, Appended) and _is_in(placed, entry)):
                    codec.put(entry, parts)
        for entry in (*behind, *placed.values()):
            codec.put(entry, parts)
        self._entries += len(pending)
        self._journal.write(parts)
        self.ticks += 1
        self._is_unsynced = True
        if self._removals and not self.is_synced:
            self._remove()

    def _flush(self, log: PartitionLog) -> Placed | None:
        placed = log.flush()
        # A member's journal is a copy, which ends where its bytes do; its snapshot must not.
        is_kept = self.is_synced or self.position is not None
        if placed is not None and is_kept and log not in self._written:
            self._written.append(log)
        return placed

    def sync(self) -> None:
        """Step 3 of a tick. May run in another thread, while nothing else uses this object."""
        self._sync_segments()
        if self._journal is not None:
            self._journal.sync()
        self._is_unsynced = False
        if self._removals:
            self._remove()

    def _sync_segments(self) -> None:
        written, self._written = self._written, []
        are_new = [log.sync() for log in written]
        if any(are_new):
            for folder in ("partitions", ""):
                self._disk.sync_folder(folder)

    def _remove(self) -> None:
        removals, self._removals = self._removals, []
        for log, segments in removals:
            log.remove(log.segments if segments is None else segments)
            if segments is None:
                self._disk.remove_folder(log.folder)

    # Snapshots

    @property
    def wants_roll(self) -> bool:
        return self._journal is not None and (
            self._journal.size > self._journal_bytes_max
            or self._entries > self._journal_entries_max
        )

    def roll(self, known: Iterable[Entry]) -> None:
        """Between two ticks: a snapshot of everything, and a new journal."""
        self._begin((0 if self._journal is None else self._journal.number) + 1, known)

    def _begin(self, number: int, known: Iterable[Entry]) -> None:
        for log in self.logs.values():
            if log.tail_bytes > _REST_BYTES_MAX:
                self._flush(log)
        self._sync_segments()
        journal.write_snapshot(self._disk, number, [*known, *self._contents()])
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal(self._disk, number, is_synced=self.is_synced)
        for folder in (journal.FOLDER, ""):
            self._disk.sync_folder(folder)
        self._entries = 0
        journal.forget_before(self._disk, number)

    def _contents(self) -> Iterator[Entry]:
        """Where the batches of all logs are, and those that are in no segment yet."""
        for log in self.logs.values():
            yield from log.known()
            for batch in log.tail:
                yield Appended(log.number, batch)
        if self.position is not None:
            yield self.position

    # Recovery

    def recover(self, state: BrokerState) -> None:
        """Bring `state` back, and be ready for the next tick. Repeated after a crash of itself."""
        number = journal.newest(self._disk)
        if number:
            for entry in journal.read_snapshot(self._disk, number):
                self._apply(state, entry)
            for log in self.logs.values():
                partition = state.topics.partitions[log.number]
                log.end = partition.end
            self._apply_frames(state, journal.read_frames(self._disk, number))
        for log in self.logs.values():
            missing = log.settle()
            if missing:
                self.missing_bytes += missing
                self.notes.append(f"{log.folder} lost {missing} bytes that were not synced to disk")
        self._remove_unknown()
        self._pending.clear()
        self._removals.clear()
        self._touched.clear()
        self._begin(number + 1, state.known())

    def _apply_frames(self, state: BrokerState, found: Frames) -> None:
        """
        All ticks, up to one whose segment bytes were not synced before the power went. Such a tick
        was never acknowledged, and is dropped as a whole with those behind it: without the bytes
        of its batches, the commit of a transaction in it would show a part of the rows.
        """
        if found.note:
            self.notes.append(found.note)
        removed = self._removed_later(found)
        for frame in found.frames:
            entries = list(frame.entries())
            placed = [one for one in entries if isinstance(one, Placed)]
            if frame.number > found.synced and not all(
                one.end_offset <= removed.get(one.partition, 0)
                or PartitionLog(one.partition, self._files).has_placed(one)
                for one in placed
            ):
                count = found.frames[-1].number - frame.number + 1
                self.notes.append(f"dropped {count} ticks that were not synced to disk")
                return
            for entry in entries:
                self._apply(state, entry)

    def _removed_later(self, found: Frames) -> dict[int, int]:
        """Partitions → the offset below which their files may be gone by the end of the journal."""
        removed: dict[int, int] = {}
        numbers = dict(self._numbers)
        for entry in (entry for frame in found.frames for entry in frame.entries()):
            match entry:
                case LogStartMoved():
                    removed[entry.partition] = entry.offset
                case TopicChanged():
                    numbers[entry.name] = entry.partitions
                case TopicDeleted():
                    removed |= dict.fromkeys(numbers.pop(entry.name, ()), _EVERY_OFFSET)
                case _:
                    pass
        return removed

    def _apply(self, state: BrokerState, entry: Entry) -> None:
        match entry:
            case SegmentKnown():
                self.logs[entry.partition].restore(entry)
            case SlotTaken():
                self.position = entry
            case SlotFilled():
                if self.position is None:
                    raise CorruptRecord("a slot in the broker's journal without its generation")
                self.position = self.position._replace(number=entry.number, crc=entry.crc)
            case Placed():
                log = self.logs.get(entry.partition)
                if log is not None:
                    partition = state.topics.partitions[entry.partition]
                    for batch in log.place(entry):
                        partition.apply(batch)
                    # Short of it only where the file is gone: it was below the start of the log.
                    partition.end = max(partition.end, entry.end_offset)
            case Appended():
                state.apply(entry)
                log = self.logs.get(entry.partition)
                if log is not None:
                    log.stage(entry.batch)
            case PartitionKnown():
                state.apply(entry)
                self.logs[entry.partition].end = entry.end
            case _:
                state.apply(entry)
                self._note(entry)

    def _remove_unknown(self) -> None:
        """Folders of deleted topics and segments below the start of a log, if still there."""
        for name in self._disk.list("partitions"):
            log = self.logs.get(int(name)) if name.isdigit() else None
            if log is None:
                self._disk.remove_folder(f"partitions/{name}")
                continue
            known = {f"{segment.base_offset:020d}" for segment in log.segments}
            for file in self._disk.list(log.folder):
                if file.partition(".")[0] not in known:
                    self._disk.remove(f"{log.folder}/{file}")

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._files.close()


def _is_in(placed: Mapping[int, Placed], entry: Appended) -> bool:
    """Not where the start of the log has moved past it within its own tick."""
    where = placed.get(entry.partition)
    return where is not None and int.from_bytes(entry.batch[:8], "big") >= where.first_offset
