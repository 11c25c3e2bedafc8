"""What another process does with a sink: `python -m epochal.testing.elsewhere <errand>`."""

from __future__ import annotations

import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from epochal.contract import Limits, Sink, Task
from epochal.terms import EpochNumber, Identity, Receipt

if TYPE_CHECKING:
    import pyarrow as pa

READY = b"ready"
_WAIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Errand:
    verb: str
    sink: Sink | None = None
    identity: Identity | None = None
    limits: Limits = Limits()
    epoch: EpochNumber = EpochNumber(0)
    receipts: tuple[Receipt, ...] = ()
    task: Task | None = None
    unfinished: Task | None = None
    batch: pa.RecordBatch | None = None


def run(errand: Errand) -> bytes:
    """What is to be printed."""
    if errand.sink is None or errand.identity is None:
        raise ValueError("an errand needs a sink and an identity")
    if errand.verb == "commit":
        committer = errand.sink.committer(errand.identity, errand.limits)
        committer.commit(errand.epoch, errand.receipts)
        committer.close()
        return b""
    receipt = _prepared(errand.sink, errand.task, errand.batch)
    if errand.verb == "prepare":
        return pickle.dumps(receipt)
    if errand.unfinished is not None and errand.batch is not None:
        errand.sink.writer(errand.unfinished).write(errand.batch)
    sys.stdout.buffer.write(READY + b"\n")
    sys.stdout.buffer.flush()
    time.sleep(_WAIT_S)
    return b""


def _prepared(sink: Sink, task: Task | None, batch: pa.RecordBatch | None) -> Receipt:
    if task is None:
        raise ValueError("to prepare needs a task")
    writer = sink.writer(task)
    if batch is not None:
        writer.write(batch)
    return writer.prepare()


if __name__ == "__main__":
    # Imported by its name, so that a pickled errand finds the same class.
    from epochal.testing import elsewhere  # noqa: PLW0406

    sys.stdout.buffer.write(
        elsewhere.run(pickle.loads(Path(sys.argv[1]).read_bytes()))  # noqa: S301  our own file
    )
