"""Pipelines to look at, made by real sessions: some well, one in doubt, one that was refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from epochal import Files, Limits, Session
from epochal.errors import EpochalError, TryAgain

SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.int64())])
TOKEN = "a-token-of-more-than-sixteen"
HASTY = Limits(commit_retry_max_s=0.0, commit_timeout_s=60.0, retry_backoff_ms=(1,))


@dataclass(frozen=True, kw_only=True)
class Stubborn(Files):
    """A target that goes away right after the decision, until the file beside it is there."""

    def committer(self, identity, limits):
        committer = super().committer(identity, limits)
        real, path = committer.commit, Path(f"{self.path}.back")

        def commit(epoch, receipts):
            if not path.exists() and epoch > 0:
                raise TryAgain("connection refused", "start the target")
            real(epoch, receipts)

        committer.commit = commit
        return committer


def rows(epoch: int, count: int = 400) -> pa.RecordBatch:
    ids = [epoch * 10_000 + at for at in range(count)]
    return pa.record_batch([ids, [one % 97 for one in ids]], schema=SCHEMA)


def healthy(root: Path, name: str, *, epochs: int = 40, refuse: int | None = None) -> None:
    """Runs and stops cleanly; one epoch is refused by a gate, then passes."""
    refused = {refuse}

    def gate(epoch):
        if epoch.number in refused:
            refused.discard(epoch.number)
            return "fewer rows than yesterday <b>by far</b>"
        return None

    sinks = [Files(root / name / "out", name="orders"), Files(root / name / "big", name="big")]
    with Session(
        name, sinks=sinks, log=root / name / "log", schema=SCHEMA, gates=[gate]
    ) as session:
        for epoch in range(epochs):
            while session.next_epoch <= epoch:
                session.begin(epoch)
                session.write(rows(epoch, 200 + (epoch * 37) % 300))
                try:
                    session.commit()
                except EpochalError:
                    continue


def pipeline_in_doubt(root: Path, name: str = "payments") -> Session:
    """Decided, and not carried out on one of two sinks. Left open, as a driver that was killed."""
    session = Session(
        name,
        sinks=[
            Files(root / name / "out", name="ledger"),
            Stubborn(root / name / "away", name="warehouse"),
        ],
        log=root / name / "log",
        schema=SCHEMA,
        limits=HASTY,
    )
    for epoch in (0, 1):
        session.begin(epoch)
        session.write(rows(epoch))
        try:
            session.commit()
        except EpochalError:
            break
    return session
