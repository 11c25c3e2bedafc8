"""
One driver in several processes, as the data source door runs it, walked by the model checker.

The planner claims or resumes, begins and leaves; the committer resumes under its claim, decides
and puts SETTLED on record. A note beside them says that a decision is being written: where its
answer was lost, the slot is closed before anything is aborted.
"""

import logging
from dataclasses import dataclass, field, replace

import pytest

from epochal.coordinator import Coordinator
from epochal.errors import EpochalError, Fenced
from epochal.protocol.admission import Admission, Unfinished
from epochal.protocol.state import RecordKind
from epochal.terms import EpochNumber
from epochal.testing.behaviour import settled_surroundings
from epochal.testing.calls import SimLog, SimSink, SimSpark
from epochal.testing.driver import Driver, JobFailed, Overtaken
from epochal.testing.model import Explorer
from epochal.testing.scenarios import IMPATIENT, Scenario

DECIDING = "deciding"
CLAIMED = "claimed"


class PlannedBefore(Driver):
    """Here the engine plans a batch before the first claim, and it is known to be our own."""

    def _start(self, position):
        return replace(super()._start(position), unfinished=Unfinished.REDO)


@dataclass(kw_only=True)
class SplitDriver(PlannedBefore):
    key: str
    notes: set = field(default_factory=set)
    closes_slots: bool = True

    def run(self):
        """The query, and once more where it failed: the same driver, other processes."""
        try:
            self._query()
        except Fenced:
            raise
        except (EpochalError, JobFailed):
            self._query()

    def _query(self):
        for number in range(self.engine.position().upcoming, self.epochs):
            epoch = EpochNumber(number)
            if not self.engine.plan(epoch):
                raise Overtaken(f"epoch {epoch}")
            self._one(epoch)
            self.engine.finish(epoch)

    def _one(self, epoch):
        offsets = self.engine.offsets(epoch)
        planner = self._process()
        try:
            record = self._claim_or_resume(planner)
            admission = planner.begin(epoch, query_id="the query", offsets=offsets)
        finally:
            planner.leave()
        if admission is Admission.REPLAY:
            return
        receipts = {}
        try:
            receipts = self._prepared(planner, epoch, [sink.name for sink in self.sinks])
            self._commit(epoch, receipts, record, offsets)
        except Exception:
            self._abort(epoch, receipts)
            raise

    def _claim_or_resume(self, planner):
        if CLAIMED in self.notes:
            planner.resume(self.key)
            if DECIDING in self.notes:
                self._close_slot(planner)
            if planner.state.unsettled is not None:
                planner.recover()
        else:
            start = replace(self._start(self.engine.position()), driver=self.key)
            planner.start(start)
            self.notes.add(CLAIMED)
        return planner.record

    def _commit(self, epoch, receipts, record, offsets):
        committer = self._process()
        try:
            committer.resume(self.key, record=record)
            if committer.take_up(epoch, query_id="the query", offsets=offsets) is Admission.REPLAY:
                return
            self.notes.add(DECIDING)
            committer.conclude(
                receipts, offsets=lambda: self.engine.offsets(epoch), began_with=offsets
            )
            committer.restate()
            self.notes.discard(DECIDING)
        finally:
            committer.leave()

    def _abort(self, epoch, receipts):
        committer = self._process()
        try:
            committer.resume(self.key)
            self._close_slot(committer)
            offsets = self.engine.offsets(epoch)
            admission = committer.take_up(epoch, query_id="the query", offsets=offsets)
            if admission is Admission.FRESH:
                committer.abort(receipts)
        finally:
            committer.leave()

    def _close_slot(self, process):
        if self.closes_slots:
            process.restate(RecordKind.PROGRESS)
        self.notes.discard(DECIDING)

    def _process(self):
        return Coordinator(log=self.log, sinks=self.sinks, limits=self.limits, around=self.around)


class SplitExplorer(Explorer):
    closes_slots = True

    def _builder(self, name):
        kind, more = SplitDriver, {"key": f"driver {name}", "closes_slots": self.closes_slots}
        if name == "Z":
            kind, more = PlannedBefore, {}

        def build(send):
            return kind(
                log=SimLog(send, name),
                sinks=[SimSink(name=sink, send=send, actor=name) for sink in self._sinks],
                engine=SimSpark(send, name),
                read=self._read(name),
                epochs=len(self._source.epochs),
                limits=self._scenario.limits,
                around=settled_surroundings(name),
                **more,
            )

        return build


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


SPLIT = Scenario(
    name="split",
    about="one driver in several processes",
    drivers="A",
    sinks=("x",),
    sizes=((1,), (1,)),
    faults=2,
    limits=IMPATIENT,
)


@pytest.mark.parametrize(
    "scenario",
    [SPLIT, replace(SPLIT, name="split-takeover", drivers="AB", sizes=((1,),), faults=0)],
    ids=lambda scenario: scenario.name,
)
def test_a_driver_in_several_processes_breaks_no_promise(scenario):
    walk = SplitExplorer(scenario).explore(seconds_max=90)
    assert walk.breach is None, "\n".join(walk.trace)
    assert walk.is_complete
    assert walk.states > 1000


def test_a_slot_that_is_not_closed_lets_an_unanswered_decision_name_what_was_aborted():
    class Careless(SplitExplorer):
        closes_slots = False

    walk = Careless(SPLIT).explore(seconds_max=90)
    assert walk.breach is not None
    assert walk.breach.rule == "I5"
