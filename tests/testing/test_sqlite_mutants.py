"""The shipped suite objects to each of twelve mistakes, and to none of the sinks without them."""

import inspect
from dataclasses import replace

import pytest
from test_epochal_sqlite import TestSQLite as ExampleSuite
from testing.plain_sqlite import BufferingSQLite, Mutant, PlainSQLite

from epochal.testing.conformance import Trial

MUTANTS = {
    "ledger after commit": (
        "LedgerAfterCommit", "a_crash_inside_a_commit_leaves_every_row_visible_once",
    ),
    "no ledger look": ("NoLedgerLook", "a_commit_may_be_repeated_by_anybody_at_any_time"),
    "any entry of the epoch": (
        "AnyEntryOfTheEpoch", "an_epoch_of_a_copied_log_is_not_taken_for_this_ones",
    ),
    "winners dropped": ("WinnersDropped", "several_tasks_become_one_epoch"),
    "abort drops all": ("AbortDropsAll", "an_abort_touches_only_what_it_names"),
    "lists other sinks' handles": (
        "ListsOtherSinks", "another_sink_of_the_same_pipeline_is_not_listed",
    ),
    "says ABORTED of prepared": (
        "SaysAbortedOfPrepared", "the_target_proves_what_became_of_a_receipt",
    ),
    "unbounded buffer": ("", "memory_does_not_grow_with_the_number_of_batches"),
    "PreparedLost without handles": ("LostWithoutHandles", "rows_that_the_target_lost_are_named"),
    "errors unsorted": ("UnsortedErrors", "a_target_that_does_not_answer_is_tried_again"),
    "empty check": ("EmptyCheck", "check_refuses_what_a_person_must_change"),
    "empty rehearse": (
        "EmptyRehearse", "a_row_that_the_target_refuses_fails_before_the_decision",
    ),
}  # fmt: skip


class TestPlain(ExampleSuite):
    """The plain version keeps every promise too."""

    kind = PlainSQLite

    def make(self, tmp_path):
        target = super().make(tmp_path)

        def plain(sink):
            return self.kind(path=sink.path, table=sink.table, busy_timeout_s=sink.busy_timeout_s)

        target.misconfigured = {name: plain(one) for name, one in target.misconfigured.items()}
        locked = target.unreachable

        class Locked:
            def __enter__(self):
                self.real = locked()
                return plain(self.real.__enter__())

            def __exit__(self, *error):
                return self.real.__exit__(*error)

        return replace(target, sink=plain(target.sink), unreachable=Locked)


def judge(name, tmp_path, kind):
    """One test of the suite, on a sink of its own."""
    suite = TestPlain()
    suite.kind = kind
    test = getattr(suite, f"test_{name}")
    trial = Trial(suite.make(tmp_path))
    try:
        test(trial, *([tmp_path] if "tmp_path" in inspect.signature(test).parameters else []))
    finally:
        trial.close()


@pytest.mark.parametrize("mistake", MUTANTS)
def test_the_suite_objects_to_a_mutant(mistake, tmp_path):
    mutation, test = MUTANTS[mistake]

    def kind(**options):
        return Mutant(mutation=mutation, **options) if mutation else BufferingSQLite(**options)

    with pytest.raises((AssertionError, pytest.fail.Exception)) as objection:
        judge(test, tmp_path, kind)
    assert not isinstance(objection.value, ModuleNotFoundError)


def test_there_are_twelve():
    assert len(MUTANTS) == 12
