"""
One micro-batch: from Spark's rows to a decision that is carried out.

Both doors and the once-only load share this; what differs between them is who calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import Limits, Sink
from epochal.coordinator import Coordinator
from epochal.protocol.admission import Admission
from epochal.protocol.machine import Phase
from epochal.spark.error_text import told
from epochal.spark.jobs import Part, drain, evaluated, prepare_all
from epochal.terms import NO_OFFSETS, EpochNumber, Offsets, Receipts

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def no_offsets() -> Offsets:
    return NO_OFFSETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Takes the batches of one start to its coordinator."""

    pipeline: str
    coordinator: Coordinator
    sinks: Sequence[Sink]
    limits: Limits
    has_gates: bool
    fingerprint: bool
    is_stateless: bool
    """Proven, not assumed: a plan that is not known counts as one with state."""
    is_narrow: bool
    """Proven likewise: computing a batch moves no row from one partition to another."""

    def run(
        self,
        batch: DataFrame,
        epoch: EpochNumber,
        *,
        query_id: str | None = None,
        offsets: Callable[[], Offsets] = no_offsets,
    ) -> Admission:
        """Write one epoch, or finish it where it is decided already. Raises what is to be told."""
        began_with = offsets()
        admission = self.coordinator.begin(epoch, query_id=query_id, offsets=began_with)
        if admission is Admission.REPLAY:
            self._replay(batch, epoch)
        else:
            self._write(batch, epoch, began_with, offsets)
        return admission

    def _write(
        self,
        batch: DataFrame,
        epoch: EpochNumber,
        began_with: Offsets,
        offsets: Callable[[], Offsets],
    ) -> None:
        self.coordinator.preparing()
        is_read_once = self.is_stateless and len(self.sinks) == 1 and not self.has_gates
        try:
            shared = nullcontext(batch) if is_read_once else evaluated(batch, self.pipeline, epoch)
            with shared as frame:
                receipts = self._prepare_in_order(
                    frame, epoch, is_narrow=self.is_narrow or not is_read_once
                )
                # From here on only the coordinator knows whether the epoch may still be aborted.
                self.coordinator.conclude(
                    receipts, offsets=offsets, began_with=began_with, frame=frame
                )
        except _PreparingFailed as failed:
            why = told(failed.error, f"epoch {epoch}")
            self.coordinator.abort(failed.receipts, because=why)
            raise why from None
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised again as ours
            why = told(error, f"epoch {epoch}")
            if self.coordinator.phase is Phase.PREPARING:
                self.coordinator.abort({}, because=why)
            raise why from None

    def _prepare_in_order(
        self, frame: DataFrame, epoch: EpochNumber, *, is_narrow: bool
    ) -> Receipts:
        """Late sinks after the others have prepared, and after all that can say no without them."""
        late = [sink for sink in self.sinks if sink.prepares_last]
        early = [sink for sink in self.sinks if not sink.prepares_last]
        if not late or not (early or self.has_gates):
            return self._prepare(frame, epoch, self.sinks, is_narrow=is_narrow)
        first = self._prepare(frame, epoch, early, is_narrow=is_narrow) if early else {}
        self.coordinator.examine(first, frame=frame)
        try:
            return {**first, **self._prepare(frame, epoch, late, is_narrow=is_narrow)}
        except _PreparingFailed as failed:
            raise _PreparingFailed({**first, **failed.receipts}, failed.error) from None

    def _prepare(
        self, frame: DataFrame, epoch: EpochNumber, sinks: Sequence[Sink], *, is_narrow: bool
    ) -> Receipts:
        prepared = prepare_all(
            frame,
            epoch,
            self._parts(sinks),
            limits=self.limits,
            fingerprint=self.fingerprint,
            is_narrow=is_narrow,
            timing=partial(self.coordinator.tracker.timing, phase=Phase.PREPARING),
        )
        if prepared.error is not None:
            raise _PreparingFailed(prepared.receipts, prepared.error)
        return prepared.receipts

    def _replay(self, batch: DataFrame, epoch: EpochNumber) -> None:
        """Its rows are decided: write none again but those that a target lost."""
        try:
            if not self.coordinator.lost:
                if not self.is_stateless:
                    drain(batch, self.pipeline, epoch)
                return
            lost = [sink for sink in self.sinks if sink.name in self.coordinator.lost]
            with evaluated(batch, self.pipeline, epoch) as frame:
                # Checkpointed: what a stage of it reads is in its place, or fails the epoch.
                self.coordinator.rewrite(self._prepare(frame, epoch, lost, is_narrow=True))
        except _PreparingFailed as failed:
            # What other sinks prepared again is named by no decision: the next start clears it.
            raise told(failed.error, f"epoch {epoch}, replayed") from None
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised again as ours
            raise told(error, f"epoch {epoch}, replayed") from None

    def _parts(self, sinks: Sequence[Sink]) -> list[Part]:
        return [
            Part(
                sink=sink,
                identity=self.coordinator.identity(sink.name),
                handout=self.coordinator.handout(sink.name),
            )
            for sink in sinks
        ]


class _PreparingFailed(Exception):
    """A sink's job failed; what the others prepared is known, and can be aborted by name."""

    def __init__(self, receipts: Receipts, error: BaseException) -> None:
        super().__init__(str(error))
        self.receipts = receipts
        self.error = error
