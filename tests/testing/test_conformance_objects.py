"""Every test of the conformance suite objects to a sink that breaks its promise."""

import threading
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from epochal.errors import EpochalError, Fenced, Misconfigured, PreparedLost, Refused
from epochal.sinks.memory import Memory
from epochal.sinks.memory.sink import MemoryCommitter, MemoryWriter
from epochal.sinks.memory.store import Store
from epochal.terms import Ability, Proof, Uid
from epochal.testing.conformance import SinkConformance, Target, Trial


class ShowsPrepared(Store):
    def rows(self):
        return pa.concat_tables(
            [super().rows(), *(one.rows for one in self._prepared.values())],
            promote_options="permissive",
        )


class KeepsAborted(Store):
    def abort(self, handles):
        """Throws nothing away."""


class RepeatsCommits(Store):
    """Keeps no ledger: what is committed twice is there twice."""

    def __init__(self):
        super().__init__()
        self._all = []

    def commit(self, identity, epoch, handles, replaces):
        self._all += [self._prepared[handle].rows for handle in handles]

    def rows(self):
        return pa.concat_tables(self._all) if self._all else super().rows()


class ShowsNewestOnly(Store):
    def commit(self, identity, epoch, handles, replaces):
        super().commit(identity, epoch, handles, True)


class TakesFirstOnly(Store):
    def commit(self, identity, epoch, handles, replaces):
        super().commit(identity, epoch, handles[:1], replaces)


class ForgetsThatItPruned(Store):
    def commit(self, identity, epoch, handles, replaces):
        ledger = next(iter(self._ledgers.values()), None)
        if ledger is not None and epoch < ledger.settled_below:
            self._visible[epoch, "again"] = next(iter(self._visible.values()))
            return
        super().commit(identity, epoch, handles, replaces)


class TakesAnyProof(Store):
    """A ledger entry of the epoch counts, under whatever handles it is."""

    def commit(self, identity, epoch, handles, replaces):
        with suppress(Refused):
            super().commit(identity, epoch, handles, replaces)


class KnowsFirstHandlesOnly(Store):
    """Rows that were written again are taken for those of somebody else."""

    def __init__(self):
        super().__init__()
        self._first = {}

    def commit(self, identity, epoch, handles, replaces):
        if self._first.setdefault(epoch, handles) != handles:
            raise Refused("other handles")
        super().commit(identity, epoch, handles, replaces)


class AbortsOnce(Store):
    def abort(self, handles):
        with self._lock:
            for handle in handles:
                del self._prepared[handle]


class AbortsAll(Store):
    def abort(self, handles):
        self._prepared.clear()


class LosesWithoutNames(Store):
    def commit(self, identity, epoch, handles, replaces):
        try:
            super().commit(identity, epoch, handles, replaces)
        except PreparedLost as error:
            raise PreparedLost(error.message) from None


class AbortsCommitted(Store):
    def abort(self, handles):
        super().abort(handles)
        self._visible.clear()


class CommitsNothing(Store):
    def commit(self, identity, epoch, handles, replaces):
        there = [handle for handle in handles if handle in self._prepared]
        super().commit(identity, epoch, there, replaces)


class ListsNothing(Store):
    def in_doubt(self, identity):
        return []


class ListsAnySink(Store):
    def in_doubt(self, identity):
        tags = {name.split("-s")[1][:8] for name in self._prepared}
        return [found for tag in tags for found in super().in_doubt(_Tagged(identity, tag))]


class _Tagged:
    def __init__(self, identity, tag):
        self.uid, self.tag = identity.uid, tag


class ListsAnyPipeline(Store):
    def in_doubt(self, identity):
        uids = {Uid(name.split("-")[1]) for name in self._prepared}
        return [found for uid in uids for found in super().in_doubt(replace(identity, uid=uid))]


class FencesCommits(Store):
    def commit(self, identity, epoch, handles, replaces):
        if identity.generation < 2:
            raise Fenced("an older driver")
        super().commit(identity, epoch, handles, replaces)


class AlwaysCommitted(Store):
    def outcome(self, identity, epoch, handle):
        return Proof.COMMITTED


class OneMark(Store):
    def newest(self, identity):
        return super().newest(identity)[:1]


class PrunesAll(Store):
    def prune(self, identity, below):
        self._ledgers.clear()


class IgnoresEmptyEpochs(Store):
    def commit(self, identity, epoch, handles, replaces):
        if handles:
            super().commit(identity, epoch, handles, replaces)


class LosesNulls(Store):
    def prepare(self, handle, rows):
        filled = pc.fill_null(rows["name"], "")
        super().prepare(handle, rows.set_column(1, "name", filled))


class MixesWriters(Store):
    def prepare(self, handle, rows):
        last = list(self._prepared.values())[-1:]
        super().prepare(handle, last[0].rows if last else rows)


class DeafToCommits(Store):
    def commit(self, identity, epoch, handles, replaces):
        if threading.current_thread() is threading.main_thread():
            super().commit(identity, epoch, handles, replaces)


class DeafToPrepares(Store):
    def prepare(self, handle, rows):
        if threading.current_thread() is threading.main_thread():
            super().prepare(handle, rows)


class CrypticErrors(Store):
    def commit(self, identity, epoch, handles, replaces):
        try:
            super().commit(identity, epoch, handles, replaces)
        except EpochalError:
            raise EpochalError("") from None


class MiscountingWriter(MemoryWriter):
    def prepare(self):
        return replace(super().prepare(), token={"raw": b"bytes"})


class LeakyWriter(MemoryWriter):
    def abort(self):
        self._store._visible["aborted", 0] = pa.Table.from_batches(self._batches)


class HastyCommitter(MemoryCommitter):
    """Spends the prepared rows on the rehearsal."""

    def rehearse(self, epoch, receipts):
        self._store.abort([str(receipt.handle) for receipt in receipts])


class OfOneThread(MemoryCommitter):
    """What it opened for the rehearsal can be used in that thread only."""

    def rehearse(self, epoch, receipts):
        self._thread = threading.get_ident()

    def commit(self, epoch, receipts):
        assert self._thread == threading.get_ident()
        super().commit(epoch, receipts)


class ComparesNothing(MemoryCommitter):
    """Begins an epoch whatever the target has lost."""

    def begin(self, begin):
        return None


class ProbingCommitter(MemoryCommitter):
    """Tries the target by writing to it."""

    def check(self, schema):
        self._store._visible["probe", 0] = pa.table({"id": [1], "name": ["probe"]})
        return [Ability(name="works", granted=True, because="")]


class TalkativeMemory(Memory):
    def __repr__(self):
        return "Memory(password='hush')"


def target(store=Store, writer=MemoryWriter, committer=MemoryCommitter, kind=Memory):
    class Declared(kind):
        """The same sink with other hands."""

        def writer(self, task):
            return writer(task, self._reference.store())

        def committer(self, identity, limits):
            self._reference.address()
            return committer(identity, self._reference.store(), replaces=False)

    has_other_hands = (writer, committer) != (MemoryWriter, MemoryCommitter)
    sink = Declared() if has_other_hands else kind()
    sink._reference._store = store()
    return Target(
        sink=sink,
        visible=lambda: [row for row in sink.rows().to_pylist() if "id" in row],
        leftovers=lambda: sink._reference.store()._prepared,
        secrets=["hush"],
    )


BROKEN = {
    "rows_are_visible_only_after_the_commit": {"store": ShowsPrepared},
    "an_abort_leaves_nothing": {"store": KeepsAborted},
    "a_writer_that_aborts_leaves_nothing": {"writer": LeakyWriter},
    "epochs_follow_each_other": {"store": ShowsNewestOnly},
    "several_tasks_become_one_epoch": {"store": TakesFirstOnly},
    "a_commit_may_be_repeated_by_anybody_at_any_time": {"store": RepeatsCommits},
    "a_commit_that_comes_after_its_proof_was_pruned_changes_nothing": {
        "store": ForgetsThatItPruned
    },
    "an_abort_may_be_repeated": {"store": AbortsOnce},
    "an_abort_after_the_commit_changes_nothing": {"store": AbortsCommitted},
    "an_abort_touches_only_what_it_names": {"store": AbortsAll},
    "rows_that_the_target_lost_are_named": {"store": LosesWithoutNames},
    "a_commit_of_what_was_thrown_away_is_not_taken_for_done": {"store": CommitsNothing},
    "a_commit_may_come_from_another_thread_than_the_rehearsal": {"committer": OfOneThread},
    "a_rehearsal_that_nobody_concluded_is_given_up": {"committer": HastyCommitter},
    "a_target_that_lost_a_committed_epoch_is_refused_before_the_decision": {
        "committer": ComparesNothing
    },
    "of_two_attempts_of_one_task_only_the_winner_is_seen": {"store": ListsNothing},
    "what_is_prepared_is_listed_with_its_whole_name": {"store": ListsNothing},
    "another_pipeline_is_neither_listed_nor_touched": {"store": ListsAnyPipeline},
    "another_sink_of_the_same_pipeline_is_not_listed": {"store": ListsAnySink},
    "a_driver_of_an_older_generation_may_commit_what_is_decided": {"store": FencesCommits},
    "the_target_proves_what_became_of_a_receipt": {"store": AlwaysCommitted},
    "the_newest_epoch_is_proven_per_uid_and_run": {"store": OneMark},
    "the_newest_proof_survives_pruning": {"store": PrunesAll},
    "an_empty_epoch_is_proven_like_others": {"store": IgnoresEmptyEpochs},
    "an_epoch_of_a_copied_log_is_not_taken_for_this_ones": {"store": TakesAnyProof},
    "an_epoch_that_a_copied_log_has_pruned_is_not_taken_for_this_ones": {"store": TakesAnyProof},
    "an_empty_epoch_of_a_copied_log_is_not_taken_for_this_ones": {"store": TakesAnyProof},
    "rows_that_were_written_again_are_this_epochs_own": {"store": KnowsFirstHandlesOnly},
    "receipts_say_how_many_rows_and_survive_json": {"writer": MiscountingWriter},
    "values_arrive_as_they_were": {"store": LosesNulls},
    "writers_work_side_by_side": {"store": MixesWriters},
    "another_process_commits_what_this_one_prepared": {"store": DeafToCommits},
    "this_process_commits_what_another_one_prepared": {"store": DeafToPrepares},
    "what_a_killed_process_prepared_is_listed_and_can_be_aborted": {"store": ListsNothing},
    "the_declaration_can_be_carried_and_shows_no_secret": {"kind": TalkativeMemory},
    "check_changes_nothing_and_gives_reasons": {"committer": ProbingCommitter},
    "errors_say_what_a_person_can_do": {"store": CrypticErrors},
}


BROKEN_ON_SQLITE = {
    "a_crash_inside_a_commit_leaves_every_row_visible_once",
    "a_row_that_the_target_refuses_fails_before_the_decision",
    "a_target_that_does_not_answer_is_tried_again",
    "check_refuses_what_a_person_must_change",
    "memory_does_not_grow_with_the_number_of_batches",
}
"""Nothing in memory can break these promises: test_sqlite_mutants shows that they are judged."""


def test_every_test_of_the_suite_has_a_sink_that_it_objects_to():
    suite = {
        name.removeprefix("test_") for name in vars(SinkConformance) if name.startswith("test_")
    }
    assert suite == set(BROKEN) | BROKEN_ON_SQLITE


@pytest.mark.parametrize("name", BROKEN)
def test_the_suite_objects(name):
    judge, trial = getattr(SinkConformance(), f"test_{name}"), Trial(target(**BROKEN[name]))
    with pytest.raises((AssertionError, EpochalError, KeyError, TypeError, pytest.fail.Exception)):
        judge(trial)


# Those with another process need a sink that can be reached from there: the reference sink's run.
@pytest.mark.parametrize("name", [name for name in BROKEN if "process" not in name])
def test_the_suite_does_not_object_to_the_same_sink_unbroken(name):
    getattr(SinkConformance(), f"test_{name}")(Trial(target()))


def test_a_suite_without_a_target_says_what_is_missing(tmp_path):
    with pytest.raises(Misconfigured, match="make"):
        SinkConformance().make(tmp_path)
