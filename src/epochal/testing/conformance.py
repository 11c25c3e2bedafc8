"""
The conformance suite: does a sink keep what `contract` promises?

It needs pytest and no Spark. A few lines apply it to a sink of your own:


    class TestMySink(SinkConformance):
        def make(self, tmp_path) -> Target:
            return Target(sink=MySink(...), visible=lambda: my_own_reader(...), ...)

`make` gives a fresh target for every test. What is visible is read by the target's own reader, and
what is left behind is looked for where this sink would leave it (`leftovers`). What the sink can't
do is declared in `Target.cannot` with the reason, and left out.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from epochal.contract import Begin, Sink
from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    Refused,
    TryAgain,
    WentBack,
)
from epochal.kit.sink_base import Cannot
from epochal.protocol.receipts import receipt_in, receipt_out
from epochal.terms import EpochNumber, Limits, Proof, Receipt
from epochal.testing.crash import crash_inside_commit
from epochal.testing.trial import OTHER_UID, UID, Target, Trial

__all__ = ["SinkConformance", "Target", "Trial"]

_LARGE_BYTES = 1_000_000
_ROUND_BATCHES = 500
_BATCH_ROWS = 100
_ROW_BYTES = 500
_GROWTH_MAX = 0.5
"""How much of a second round of batches may be held in memory: buffers are filled by the first."""

_TRANSIENT = (TryAgain, OutcomeUnknown, OSError)
"""Errors after which a verb is repeated; after a lost reply its outcome is asked for first."""

ZERO = EpochNumber(0)


class SinkConformance:
    """Derive from it, name the class Test…, and give `make`."""

    def make(self, tmp_path: Path) -> Target:
        raise Misconfigured(
            "this suite has no target", f"make(tmp_path) -> Target; {tmp_path} is free"
        )

    @pytest.fixture
    def trial(self, tmp_path: Path) -> Iterator[Trial]:
        trial = Trial(self.make(tmp_path))
        yield trial
        trial.close()

    # What readers see

    def test_rows_are_visible_only_after_the_commit(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1, 2), trial.batch(3))
        assert trial.ids() == [], "prepared rows are visible (I1)"
        committer.rehearse(ZERO, [receipt])
        assert trial.ids() == [], "rehearsed rows are visible (I1)"
        committer.commit(ZERO, [receipt])
        assert trial.ids() == [1, 2, 3]

    def test_an_abort_leaves_nothing(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1, 2))
        committer.rehearse(ZERO, [receipt])
        committer.abort(ZERO, [receipt])
        assert trial.ids() == []
        assert not trial.handles()
        assert not trial.target.leftovers()

    def test_a_writer_that_aborts_leaves_nothing(self, trial: Trial) -> None:
        writer = trial.sink.writer(trial.task(trial.handle(0)))
        writer.write(trial.batch(1))
        writer.abort()
        trial.sweep()
        assert trial.ids() == []
        assert not trial.target.leftovers()

    def test_epochs_follow_each_other(self, trial: Trial) -> None:
        for epoch in range(3):
            trial.commit(epoch, trial.prepare(epoch, trial.batch(epoch)))
        assert trial.ids() == [0, 1, 2]

    def test_several_tasks_become_one_epoch(self, trial: Trial) -> None:
        receipts = [trial.prepare(0, trial.batch(at), partition=at) for at in range(4)]
        trial.commit(0, *receipts)
        assert trial.ids() == [0, 1, 2, 3]
        assert not trial.handles()

    def test_a_target_that_lost_a_committed_epoch_is_refused_before_the_decision(
        self, trial: Trial
    ) -> None:
        committer = trial.committer()
        trial.commit(0, trial.prepare(0, trial.batch(1)))
        if committer.newest() is None:
            return
        committer.begin(Begin(epoch=EpochNumber(1), newest_committed=ZERO))
        kept = trial.prepare(8, trial.batch(2))
        receipt = trial.prepare(9, trial.batch(3))
        nine = EpochNumber(9)
        with pytest.raises(WentBack):  # noqa: PT012  either of the two may find it
            committer.begin(Begin(epoch=nine, newest_committed=EpochNumber(8)))
            committer.rehearse(nine, [receipt])
        assert trial.ids() == [1]
        assert {kept.handle, receipt.handle} <= trial.handles(), "prepared rows were thrown away"
        trial.abort(8, kept)
        trial.abort(9, receipt)

    # Every verb may be repeated

    def test_a_commit_may_be_repeated_by_anybody_at_any_time(self, trial: Trial) -> None:
        first = trial.prepare(0, trial.batch(1, 2))
        trial.commit(0, first)
        trial.commit(0, first)
        trial.commit(0, first, generation=2)
        later = trial.prepare(1, trial.batch(3))
        trial.commit(1, later)
        trial.commit(0, first)
        assert trial.ids() == [1, 2, 3], "a repeated commit changed what is visible"

    def test_a_commit_that_comes_after_its_proof_was_pruned_changes_nothing(
        self, trial: Trial
    ) -> None:
        first = trial.prepare(0, trial.batch(1))
        trial.commit(0, first)
        trial.commit(1, trial.prepare(1, trial.batch(2)))
        trial.committer().prune(EpochNumber(1))
        with suppress(EpochalError):
            trial.commit(0, first)
        assert trial.ids() == [1, 2]

    def test_an_abort_may_be_repeated(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1))
        trial.abort(0, receipt)
        trial.abort(0, receipt)
        trial.abort(0)
        assert not trial.target.leftovers()

    def test_an_abort_after_the_commit_changes_nothing(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1, 2))
        trial.commit(0, receipt)
        trial.abort(0, receipt)
        assert trial.ids() == [1, 2], "an abort removed committed rows"
        assert trial.committer().outcome(ZERO, receipt) is Proof.COMMITTED

    def test_an_abort_touches_only_what_it_names(self, trial: Trial) -> None:
        theirs = trial.prepare(0, trial.batch(1), uid=OTHER_UID)
        kept, aborted = (trial.prepare(0, trial.batch(at), partition=at) for at in (2, 3))
        trial.abort(0, aborted)
        assert trial.handles() == {kept.handle}
        trial.commit(0, kept)
        trial.commit(0, theirs, uid=OTHER_UID)
        assert trial.ids() == [1, 2], "an abort removed attempts that it did not name (I5)"

    def test_a_commit_of_what_was_thrown_away_is_not_taken_for_done(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1))
        trial.abort(0, receipt)
        with pytest.raises(EpochalError):
            trial.commit(0, receipt)
        assert trial.ids() == []
        assert trial.committer().outcome(ZERO, receipt) is not Proof.COMMITTED

    def test_rows_that_the_target_lost_are_named(self, trial: Trial) -> None:
        _require(trial, "name lost rows")
        kept, lost = (trial.prepare(0, trial.batch(at), partition=at) for at in range(2))
        trial.abort(0, lost)
        with pytest.raises(PreparedLost) as caught:
            trial.commit(0, kept, lost)
        assert caught.value.handles == (str(lost.handle),), "which rows are to be written again?"
        if caught.value.shows_none:
            assert trial.ids() == [], "rows that are visible would be written again"

    def test_a_commit_may_come_from_another_thread_than_the_rehearsal(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1))
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as another:
            one.submit(committer.rehearse, ZERO, [receipt]).result()
            another.submit(committer.commit, ZERO, [receipt]).result()
        assert trial.ids() == [1]

    def test_a_rehearsal_that_nobody_concluded_is_given_up(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1))
        committer.rehearse(ZERO, [receipt])
        committer.close()
        trial.commit(0, receipt, generation=2)
        assert trial.ids() == [1]

    # Attempts, and what is in doubt

    def test_of_two_attempts_of_one_task_only_the_winner_is_seen(self, trial: Trial) -> None:
        loser = trial.prepare(0, trial.batch(1, 2))
        winner = trial.prepare(0, trial.batch(1, 2))
        trial.commit(0, winner)
        assert trial.ids() == [1, 2]
        assert trial.handles() == {loser.handle}, "the loser is not listed (I5)"
        trial.sweep()
        assert trial.ids() == [1, 2]
        assert not trial.handles()
        assert not trial.target.leftovers()

    def test_what_is_prepared_is_listed_with_its_whole_name(self, trial: Trial) -> None:
        assert not trial.handles()
        receipts = [trial.prepare(7, trial.batch(at), partition=at) for at in range(2)]
        assert trial.handles() == {receipt.handle for receipt in receipts}
        trial.commit(7, receipts[0])
        assert trial.handles() == {receipts[1].handle}

    def test_another_pipeline_is_neither_listed_nor_touched(self, trial: Trial) -> None:
        theirs = trial.prepare(0, trial.batch(1), uid=OTHER_UID)
        assert not trial.handles(), "handles of another uid are listed (I5)"
        trial.sweep()
        assert trial.handles(uid=OTHER_UID) == {theirs.handle}
        trial.commit(0, theirs, uid=OTHER_UID)
        assert trial.ids() == [1]

    def test_another_sink_of_the_same_pipeline_is_not_listed(self, trial: Trial) -> None:
        trial.prepare(0, trial.batch(1), sink="another name")
        assert not trial.handles()

    def test_a_driver_of_an_older_generation_may_commit_what_is_decided(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1), generation=1)
        trial.begin(1, generation=2)
        trial.commit(0, receipt, generation=1)
        assert trial.ids() == [1], "committing needs the decision, not the generation (I7)"

    # Proofs

    def test_the_target_proves_what_became_of_a_receipt(self, trial: Trial) -> None:
        committed, aborted, open_ = (
            trial.prepare(0, trial.batch(at), partition=at) for at in range(3)
        )
        trial.commit(0, committed)
        trial.abort(0, aborted)
        ask = trial.committer().outcome
        assert ask(ZERO, committed) is Proof.COMMITTED
        assert ask(ZERO, aborted) is not Proof.COMMITTED
        assert ask(ZERO, open_) is Proof.UNKNOWN, "prepared is neither failed nor done (I9)"

    def test_the_newest_epoch_is_proven_per_uid_and_run(self, trial: Trial) -> None:
        if trial.committer().newest() is None:
            pytest.skip("this target keeps no such proof: newest() is None")
        assert not trial.committer().newest()
        trial.commit(3, trial.prepare(3, trial.batch(1), run="backfill"), run="backfill")
        trial.commit(4, trial.prepare(4, trial.batch(2), run="backfill"), run="backfill")
        trial.commit(9, trial.prepare(9, trial.batch(3), uid=OTHER_UID), uid=OTHER_UID)
        marks = trial.committer().newest() or ()
        found = {(mark.uid, mark.epoch, mark.run) for mark in marks}
        assert found == {(UID, 4, "backfill"), (OTHER_UID, 9, None)}

    def test_the_newest_proof_survives_pruning(self, trial: Trial) -> None:
        before = trial.committer().newest()
        receipt = trial.prepare(0, trial.batch(1))
        trial.commit(0, receipt)
        trial.committer().prune(EpochNumber(5))
        after = trial.committer().newest()
        assert before is None or [mark.epoch for mark in after or ()] == [0]
        trial.commit(0, receipt)
        assert trial.ids() == [1]

    def test_an_empty_epoch_is_proven_like_others(self, trial: Trial) -> None:
        trial.commit(0)
        trial.commit(0)
        trial.commit(1, trial.prepare(1))
        marks = trial.committer().newest()
        assert marks is None or [mark.epoch for mark in marks] == [1]
        trial.commit(2)
        marks = trial.committer().newest()
        assert marks is None or [mark.epoch for mark in marks] == [2], "epoch 2 is not proven (I8)"
        assert trial.ids() == []

    # A cloned machine: two drivers with the same log, uid and generation, but not the same claim

    def test_an_epoch_of_a_copied_log_is_not_taken_for_this_ones(self, trial: Trial) -> None:
        mine = trial.prepare(0, trial.batch(1, 2))
        theirs = trial.prepare(0, trial.batch(3), is_copy=True)
        assert trial.handles() == {mine.handle, theirs.handle}, "one overwrote the other (I6)"
        trial.commit(0, theirs, is_copy=True)
        with pytest.raises(Refused):
            trial.commit(0, mine)
        assert trial.committer().outcome(ZERO, mine) is not Proof.COMMITTED
        assert mine.handle in trial.handles(), "rows of a decided epoch are lost"
        trial.commit(0, theirs, is_copy=True)
        # What a person does in the end; prepared rows may hold readers up until then.
        trial.abort(0, mine)
        assert trial.ids() == [3], "an epoch was carried out twice, or rows were taken for others"

    def test_an_epoch_that_a_copied_log_has_pruned_is_not_taken_for_this_ones(
        self, trial: Trial
    ) -> None:
        mine = trial.prepare(0, trial.batch(1, 2))
        for epoch in range(2):
            theirs = trial.prepare(epoch, trial.batch(3 + epoch), is_copy=True)
            trial.commit(epoch, theirs, is_copy=True)
        trial.committer(is_copy=True).prune(EpochNumber(1))
        with pytest.raises(Refused):
            trial.commit(0, mine)
        assert mine.handle in trial.handles(), "rows of a decided epoch are lost"
        trial.abort(0, mine)
        assert trial.ids() == [3, 4]

    def test_an_empty_epoch_of_a_copied_log_is_not_taken_for_this_ones(self, trial: Trial) -> None:
        mine = trial.prepare(0, trial.batch(1))
        trial.commit(0, trial.prepare(0, is_copy=True), is_copy=True)
        with pytest.raises(Refused):
            trial.commit(0, mine)
        assert trial.ids() == []

    def test_rows_that_were_written_again_are_this_epochs_own(self, trial: Trial) -> None:
        _require(trial, "name lost rows")
        kept, lost = (trial.prepare(0, trial.batch(at), partition=at) for at in range(2))
        trial.abort(0, lost)
        with pytest.raises(PreparedLost):
            trial.commit(0, kept, lost)
        written = trial.prepare(0, trial.batch(1), partition=1, generation=2)
        again = replace(written, replaces=(kept.handle.claim,))
        trial.commit(0, kept, again, generation=2)
        trial.commit(0, kept, again, generation=3)
        assert trial.ids() == [0, 1]

    # Values

    def test_receipts_say_how_many_rows_and_survive_json(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1, 2), trial.batch(3))
        assert receipt.rows == 3
        again = receipt_in(json.loads(json.dumps(receipt_out(receipt))))
        assert again == receipt
        trial.commit(0, again)
        assert trial.ids() == [1, 2, 3]

    def test_values_arrive_as_they_were(self, trial: Trial) -> None:
        rows = [
            (1, "grüß dich, 世界 🌍"),
            (2, None),
            (3, ""),
            (4, "tab\tquote\"comma,newline\nback\\slash'\r\n"),
            (5, "x" * _LARGE_BYTES),
            (-(2**63), "the least"),
            (2**63 - 1, "the most"),
        ]
        trial.commit(0, trial.prepare(0, trial.rows(rows)))
        assert trial.seen() == Counter(rows)

    def test_writers_work_side_by_side(self, trial: Trial) -> None:
        tasks = [trial.task(trial.handle(0, at)) for at in range(8)]

        def write(at: int) -> Receipt:
            writer = trial.sink.writer(tasks[at])
            for number in range(10):
                writer.write(
                    trial.batch(*range(at * 1000 + number * 10, at * 1000 + number * 10 + 10))
                )
            return writer.prepare()

        with ThreadPoolExecutor(8) as pool:
            receipts = list(pool.map(write, range(8)))
        trial.commit(0, *receipts)
        assert len(trial.ids()) == len(set(trial.ids())) == 800

    # Other processes

    def test_another_process_commits_what_this_one_prepared(self, trial: Trial) -> None:
        _require(trial, "reach other processes")
        receipt = trial.prepare(0, trial.batch(1, 2))
        trial.commit_in_other_process(0, [receipt])
        assert trial.ids() == [1, 2]
        trial.commit(0, receipt)
        assert trial.ids() == [1, 2]

    def test_this_process_commits_what_another_one_prepared(self, trial: Trial) -> None:
        _require(trial, "reach other processes")
        receipt = trial.prepare_in_other_process(trial.handle(0), trial.batch(1, 2))
        assert trial.ids() == []
        trial.commit(0, receipt)
        assert trial.ids() == [1, 2]

    def test_what_a_killed_process_prepared_is_listed_and_can_be_aborted(
        self, trial: Trial
    ) -> None:
        _require(trial, "reach other processes")
        prepared, unfinished = trial.handle(0, 0), trial.handle(0, 1)
        trial.die_while_preparing(prepared, unfinished)
        assert trial.ids() == []
        assert prepared in trial.handles()
        trial.sweep()
        assert not trial.handles()
        assert trial.ids() == []
        assert not trial.target.leftovers()

    # The declaration

    def test_the_declaration_can_be_carried_and_shows_no_secret(self, trial: Trial) -> None:
        missing = [name for name in _members(Sink) if not hasattr(trial.sink, name)]
        assert not missing, f"derive from epochal.kit.SinkBase: there is no {', '.join(missing)}"
        again = pickle.loads(pickle.dumps(trial.sink))  # noqa: S301  our own bytes
        assert again.name == trial.sink.name
        described = json.dumps(trial.sink.describe())
        assert {"kind", "target"} <= trial.sink.describe().keys()
        for secret in trial.target.secrets:
            assert secret not in described, "describe() shows a secret"
            assert secret not in repr(trial.sink), "the repr shows a secret"
            assert secret not in repr(again), "the repr shows a secret"

    def test_check_changes_nothing_and_gives_reasons(self, trial: Trial) -> None:
        abilities = trial.committer().check(trial.target.schema)
        assert all(ability.name and ability.because for ability in abilities)
        assert trial.ids() == []
        assert not trial.handles()

    def test_check_refuses_what_a_person_must_change(self, trial: Trial) -> None:
        _require(trial, "be misconfigured", given=bool(trial.target.misconfigured))
        for wrong, sink in trial.target.misconfigured.items():
            error = _error_of(partial(trial.committer(sink).check, trial.target.schema))
            assert isinstance(error, Misconfigured), f"check with {wrong}: {error!r}"
            assert error.hint, f"check with {wrong}: the error shows no way out"

    def test_a_target_that_does_not_answer_is_tried_again(self, trial: Trial) -> None:
        _require(trial, "be unreachable", given=trial.target.unreachable is not None)
        task = trial.task(trial.handle(0))

        def prepare(sink: Sink) -> None:
            writer = sink.writer(task)
            writer.write(trial.batch(1))
            writer.prepare()

        verbs: dict[str, Callable[[Sink], object]] = {
            "check": lambda sink: trial.committer(sink).check(trial.target.schema),
            "in_doubt": lambda sink: trial.committer(sink).in_doubt(),
            "commit": lambda sink: trial.committer(sink).commit(ZERO, []),
            "prepare": prepare,
        }
        unreachable = trial.target.unreachable
        with unreachable() if unreachable else nullcontext(trial.sink) as sink:
            for verb, call in verbs.items():
                error = _error_of(partial(call, sink))
                assert error is not None, f"{verb} passes although the target does not answer"
                assert isinstance(error, _TRANSIENT), f"{verb}: not to be repeated by {error!r}"
        trial.sweep()
        assert trial.ids() == []

    def test_errors_say_what_a_person_can_do(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1))
        trial.abort(0, receipt)
        with pytest.raises(EpochalError) as caught:
            trial.commit(0, receipt)
        assert caught.value.message
        assert not isinstance(caught.value, Misconfigured) or caught.value.hint

    # Limits

    def test_a_row_that_the_target_refuses_fails_before_the_decision(self, trial: Trial) -> None:
        _require(trial, "refuse rows", given=trial.target.refused is not None)
        refused = [row for row in [trial.target.refused] if row is not None]
        committer = trial.committer()
        committer.check(trial.target.schema)
        receipts: list[Receipt] = []

        def up_to_the_decision() -> None:
            receipts.append(trial.prepare(0, trial.batch(1), trial.rows(refused)))
            committer.rehearse(ZERO, receipts)

        error = _error_of(up_to_the_decision)
        assert error is not None, "the row passes the rehearsal: its epoch would be decided (I3)"
        assert isinstance(error, Misconfigured), f"only a person can help, and this is {error!r}"
        committer.abort(ZERO, receipts)
        committer.close()
        trial.sweep()
        assert trial.ids() == []
        assert not trial.target.leftovers()
        trial.commit(0, trial.prepare(0, trial.batch(1)))
        assert trial.ids() == [1]

    def test_memory_does_not_grow_with_the_number_of_batches(self, trial: Trial) -> None:
        _require(trial, "bound memory")
        _require(trial, "reach other processes")
        rows = [(number, "x" * _ROW_BYTES) for number in range(_BATCH_ROWS)]
        batches = [trial.rows(rows)] * _ROUND_BATCHES
        task = replace(trial.task(trial.handle(0)), limits=Limits(buffer_rows=_BATCH_ROWS))
        once, twice = trial.peaks_in_other_process(task, batches)
        round_kib = _ROUND_BATCHES * _BATCH_ROWS * _ROW_BYTES / 1024
        assert twice - once < _GROWTH_MAX * round_kib, (
            f"{twice - once:,.0f} KiB more for {round_kib:,.0f} KiB of rows: write() keeps them; "
            "a buffer with a limit has to be smaller than them in the sink of this target"
        )

    # The whole way: a session whose process dies while it commits

    def test_a_crash_inside_a_commit_leaves_every_row_visible_once(
        self, trial: Trial, tmp_path: Path
    ) -> None:
        if trial.target.calls is None:
            _require(trial, "reach other processes")
        crash_inside_commit(trial, tmp_path)


def _require(trial: Trial, ability: Cannot, *, given: bool = True) -> None:
    """Leave a test out where the sink's author declared why; ask for what is not given."""
    reason = trial.target.cannot.get(ability)
    if reason is not None:
        pytest.skip(f"can't {ability}: {reason}")
    if not given:
        pytest.fail(f"{_ASKED[ability]}, or Target(cannot={{{ability!r}: 'the reason'}})")


_ASKED: dict[str, str] = {
    "refuse rows": "give Target(refused=…), a row that the target never takes",
    "be unreachable": "give Target(unreachable=…), a sink whose target does not answer",
    "be misconfigured": "give Target(misconfigured=…), sinks that check must refuse",
}


def _error_of(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001  its class is what is judged
        return error
    return None


def _members(protocol: type) -> list[str]:
    return [name for name in vars(protocol) if not name.startswith("_")]
