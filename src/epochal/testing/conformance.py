"""
The conformance suite: does a sink keep what `contract` promises?

It needs pytest and no Spark. A few lines apply it to a sink of your own:


    class TestMySink(SinkConformance):
        def make(self, tmp_path) -> Target:
            return Target(sink=MySink(...), visible=lambda: my_own_reader(...))

`make` gives a fresh target for every test. What is visible is read by the target's own reader, and
what is left behind is looked for where this sink would leave it (`leftovers`).
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from epochal.contract import Begin
from epochal.errors import EpochalError, Misconfigured
from epochal.protocol.records import receipt_in, receipt_out
from epochal.terms import EpochNumber, Proof
from epochal.testing.trial import OTHER_UID, UID, Target, Trial

__all__ = ["SinkConformance", "Target", "Trial"]

_LARGE_BYTES = 1_000_000


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
        committer.rehearse(EpochNumber(0), [receipt])
        assert trial.ids() == [], "rehearsed rows are visible (I1)"
        committer.commit(EpochNumber(0), [receipt])
        assert trial.ids() == [1, 2, 3]

    def test_an_abort_leaves_nothing(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1, 2))
        committer.rehearse(EpochNumber(0), [receipt])
        committer.abort(EpochNumber(0), [receipt])
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
        assert trial.committer().outcome(EpochNumber(0), receipt) is Proof.COMMITTED

    def test_a_commit_of_what_was_thrown_away_is_not_taken_for_done(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1))
        trial.abort(0, receipt)
        with pytest.raises(EpochalError):
            trial.commit(0, receipt)
        assert trial.ids() == []
        assert trial.committer().outcome(EpochNumber(0), receipt) is not Proof.COMMITTED

    def test_a_rehearsal_that_nobody_concluded_is_given_up(self, trial: Trial) -> None:
        committer = trial.committer()
        receipt = trial.prepare(0, trial.batch(1))
        committer.rehearse(EpochNumber(0), [receipt])
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
        trial.committer(generation=2).begin(Begin(epoch=EpochNumber(1)))
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
        assert ask(EpochNumber(0), committed) is Proof.COMMITTED
        assert ask(EpochNumber(0), aborted) is not Proof.COMMITTED
        assert ask(EpochNumber(0), open_) is Proof.UNKNOWN, (
            "prepared is neither failed nor done (I9)"
        )

    def test_the_newest_epoch_is_proven_per_uid_and_run(self, trial: Trial) -> None:
        if trial.committer().newest() is None:
            pytest.skip("this target keeps no such proof, and says so")
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
        handles = [trial.handle(0, at) for at in range(8)]

        def write(at: int) -> object:
            writer = trial.sink.writer(trial.task(handles[at]))
            for number in range(10):
                writer.write(
                    trial.batch(*range(at * 1000 + number * 10, at * 1000 + number * 10 + 10))
                )
            return writer.prepare()

        with ThreadPoolExecutor(8) as pool:
            receipts = list(pool.map(write, range(8)))
        trial.commit(0, *receipts)  # type: ignore[arg-type] # what write gives
        assert len(trial.ids()) == len(set(trial.ids())) == 800

    # Other processes

    def test_another_process_commits_what_this_one_prepared(self, trial: Trial) -> None:
        self._require_other_processes(trial)
        receipt = trial.prepare(0, trial.batch(1, 2))
        trial.commits_elsewhere(0, [receipt])
        assert trial.ids() == [1, 2]
        trial.commit(0, receipt)
        assert trial.ids() == [1, 2]

    def test_this_process_commits_what_another_one_prepared(self, trial: Trial) -> None:
        self._require_other_processes(trial)
        trial.committer().begin(Begin(epoch=EpochNumber(0)))
        receipt = trial.prepares_elsewhere(trial.handle(0), trial.batch(1, 2))
        assert trial.ids() == []
        trial.commit(0, receipt)
        assert trial.ids() == [1, 2]

    def test_what_a_killed_process_prepared_is_listed_and_can_be_aborted(
        self, trial: Trial
    ) -> None:
        self._require_other_processes(trial)
        trial.committer().begin(Begin(epoch=EpochNumber(0)))
        prepared, unfinished = trial.handle(0, 0), trial.handle(0, 1)
        trial.dies_while_preparing(prepared, unfinished)
        assert trial.ids() == []
        assert prepared in trial.handles()
        trial.sweep()
        assert not trial.handles()
        assert trial.ids() == []
        assert not trial.target.leftovers()

    def _require_other_processes(self, trial: Trial) -> None:
        if not trial.target.reaches_other_processes:
            pytest.skip("this target can't be reached from another process")

    # The declaration

    def test_the_declaration_can_be_carried_and_shows_no_secret(self, trial: Trial) -> None:
        again = pickle.loads(pickle.dumps(trial.sink))  # noqa: S301  our own bytes
        assert again.name == trial.sink.name
        told = json.dumps(trial.sink.describe())
        assert {"kind", "target"} <= trial.sink.describe().keys()
        for secret in trial.target.secrets:
            assert secret not in told, "describe() shows a secret"
            assert secret not in repr(trial.sink), "the repr shows a secret"
            assert secret not in repr(again), "the repr shows a secret"

    def test_check_changes_nothing_and_gives_reasons(self, trial: Trial) -> None:
        abilities = trial.committer().check(trial.target.schema)
        assert all(ability.name and ability.because for ability in abilities)
        assert trial.ids() == []
        assert not trial.handles()

    def test_errors_say_what_a_person_can_do(self, trial: Trial) -> None:
        receipt = trial.prepare(0, trial.batch(1))
        trial.abort(0, receipt)
        with pytest.raises(EpochalError) as caught:
            trial.commit(0, receipt)
        assert caught.value.message
        assert not isinstance(caught.value, Misconfigured) or caught.value.hint
