"""
The audit: what a plain reader of the targets sees, row by row, against what the source holds.

It trusts nothing of ours: each target is read by its own client, and which rows belong together is
told by a column that the source wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import pyarrow as pa
import pyarrow.compute as pc

from epochal.contract import DEFAULT_LIMITS
from epochal.coordinator import read_state
from epochal.demo.place import Place
from epochal.demo.readers import READERS
from epochal.demo.source import part_sizes
from epochal.logs import checkpoint_log
from epochal.terms import Identity, SinkName


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    rows: int
    sinks: int
    epochs: int
    lost: int
    duplicated: int
    torn_epochs: int
    left_in_doubt: int

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicated or self.torn_epochs or self.left_in_doubt)

    def told(self) -> dict[str, int]:
        return asdict(self)


def audit(place: Place, *, rows: int, parts: int) -> Verdict:
    """Asks the servers, so they must run."""
    seen = {sink: read(place) for sink, read in READERS.items()}
    return Verdict(
        rows=rows,
        sinks=len(seen),
        epochs=_epochs(place),
        lost=sum(rows - _distinct(table) for table in seen.values()),
        duplicated=sum(table.num_rows - _distinct(table) for table in seen.values()),
        torn_epochs=_torn(seen, part_sizes(rows, parts)),
        left_in_doubt=_left_in_doubt(place),
    )


def _distinct(table: pa.Table) -> int:
    return int(pc.count_distinct(table["id"]).as_py())


def _torn(seen: Mapping[SinkName, pa.Table], sizes: list[int]) -> int:
    """Parts of the source that some sink shows in part, or one sink shows and another does not."""
    counts = [_rows_by_part(table) for table in seen.values()]
    return sum(
        1
        for part, size in enumerate(sizes)
        if {count.get(part, 0) for count in counts} not in ({0}, {size})
    )


def _rows_by_part(table: pa.Table) -> dict[int, int]:
    grouped = table.group_by("part").aggregate([("id", "count_distinct")])
    return dict(
        zip(grouped["part"].to_pylist(), grouped["id_count_distinct"].to_pylist(), strict=True)
    )


def _epochs(place: Place) -> int:
    state = read_state(checkpoint_log(place.checkpoint))
    return 0 if state is None else state.expected


def _left_in_doubt(place: Place) -> int:
    state = read_state(checkpoint_log(place.checkpoint))
    if state is None:
        return 0
    left = len(state.pending)
    for sink in place.sinks():
        identity = Identity(
            pipeline=state.pipeline, uid=state.uid, sink=sink.name, generation=state.generation
        )
        committer = sink.committer(identity, DEFAULT_LIMITS)
        left += len(committer.in_doubt())
        committer.close()
    return left
