"""Calls under keys that never change, made after the decision, from what the decision fixed."""

from __future__ import annotations

import json
import threading
import traceback

import pytest

from epochal.errors import Misconfigured, RowRejected, TryAgain
from epochal.kit.spool.ledger import SpoolLedger
from epochal.sinks.http import Http, idempotency_key
from epochal.sinks.http.idempotency_key import KeyedDelivery
from epochal.testing.trial import Target, Trial


class Died(BaseException):
    """As by SIGKILL."""


@pytest.fixture
def make(service, tmp_path):
    trials = []

    def make(**options) -> Trial:
        options = {"retries_max": 0, "concurrency": 4, **options}
        sink = Http(service.url, mode="idempotency-key", spool=tmp_path, name="keyed", **options)
        trials.append(Trial(Target(sink=sink, visible=service.rows)))
        return trials[-1]

    yield make
    for trial in trials:
        trial.close()


def prepared(trial: Trial) -> list:
    return [
        trial.prepare(0, trial.batch(*range(at * 10, at * 10 + 5)), partition=at) for at in (0, 1)
    ]


def test_a_call_whose_reply_is_lost_is_made_again_under_its_key(service, make):
    trial = make()
    receipts = prepared(trial)
    lost: set[str] = set()

    def hangs_up(key: str) -> bool:
        is_first = key not in lost and key.endswith(("c1", "c3"))
        lost.add(key)
        return is_first

    service.hangs_up = hangs_up
    for _ in range(10):
        try:
            trial.commit(0, *receipts)
        except TryAgain:
            continue
        break
    assert trial.ids() == [*range(5), *range(10, 15)]
    assert sum(service.calls.values()) == 14
    assert max(service.calls.values()) == 2


def test_what_was_acknowledged_is_not_called_again_by_another_driver(service, make):
    trial = make(order="epoch")
    receipts = prepared(trial)
    service.answers = lambda request, body: 503 if json.loads(body)["id"] == 12 else None
    with pytest.raises(TryAgain, match=r"epoch 0: .*503.*7 calls taken"):
        trial.commit(0, *receipts)
    assert len(trial.ids()) == 7
    assert trial.committer().newest() == []
    service.answers = lambda request, body: None
    trial.commit(0, *receipts, generation=2)
    assert trial.ids() == [*range(5), *range(10, 15)]
    assert sorted(service.calls.values()) == [1] * 9 + [2]


def dies_before_its_proof(trial, receipts, monkeypatch) -> None:
    """All calls are made, and neither acknowledgements nor proof are written down."""
    with monkeypatch.context() as patch:
        patch.setattr(idempotency_key.Acknowledged, "_flush", lambda self: None)
        patch.setattr(SpoolLedger, "settle", lambda *_: (_ for _ in ()).throw(Died))
        with pytest.raises(Died):
            trial.commit(0, *receipts)


def test_a_driver_that_dies_before_it_wrote_anything_down_calls_again_under_the_same_keys(
    service, make, monkeypatch
):
    receipts = prepared(make())
    dies_before_its_proof(make(), receipts, monkeypatch)
    make().commit(0, *receipts, generation=2)
    assert make().ids() == [*range(5), *range(10, 15)]
    assert set(service.calls.values()) == {2}


def test_keys_that_changed_would_be_seen(service, make, monkeypatch):
    receipts = prepared(make())
    dies_before_its_proof(make(), receipts, monkeypatch)
    honest = KeyedDelivery._key
    monkeypatch.setattr(KeyedDelivery, "_key", lambda *given: honest(*given) + "!")
    make().commit(0, *receipts)
    assert len(make().ids()) == 20


def test_how_many_rows_make_a_call_is_fixed_by_the_decision(service, make, monkeypatch):
    receipts = prepared(make(rows_per_call=2))
    dies_before_its_proof(make(rows_per_call=2), receipts, monkeypatch)
    make(rows_per_call=5).commit(0, *receipts)
    assert make().ids() == [*range(5), *range(10, 15)]
    assert sorted(len(rows) for rows in service.taken.values()) == [1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(("body", "kind"), [("json", "json"), ("ndjson", "x-ndjson")])
def test_several_rows_travel_as_an_array_or_as_lines(service, make, body, kind):
    trial = make(rows_per_call=3, body=body)
    trial.commit(0, *prepared(trial))
    assert trial.ids() == [*range(5), *range(10, 15)]
    assert {one["Content-Type"] for one in service.headers} == {f"application/{kind}"}


@pytest.mark.parametrize(
    ("order", "at_once"), [("none", 4), ("partition", 2), ("epoch", 1)], ids=str
)
def test_calls_wait_for_each_other_as_the_order_demands(service, make, order, at_once):
    trial = make(order=order)
    receipts = prepared(trial)
    seen: list[int] = []
    has_met, moment = threading.Event(), threading.Event()

    def answers(request, body) -> None:
        """Nobody leaves before as many as may have met; more of them would meet in a moment."""
        seen.append(json.loads(body)["id"])
        if service.at_once_most >= at_once:
            has_met.set()
        has_met.wait(60)
        moment.wait(0.02)

    service.answers = answers
    trial.commit(0, *receipts)
    assert service.at_once_most == at_once
    by_partition = [[one for one in seen if one // 10 == at] for at in (0, 1)]
    if order != "none":
        assert by_partition == [list(range(5)), list(range(10, 15))]
    if order == "epoch":
        assert seen == by_partition[0] + by_partition[1]


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504])
def test_a_service_that_says_not_now_is_asked_again(service, make, status):
    trial = make(retries_max=2)
    trial.target.limits = type(trial.target.limits)(retry_backoff_ms=(1,))
    receipts = [trial.prepare(0, trial.batch(1))]
    left = [status, status]
    service.answers = lambda request, body: left.pop() if left else None
    trial.commit(0, *receipts)
    assert trial.ids() == [1]
    assert list(service.calls.values()) == [3]


def test_rows_that_are_refused_for_good_stop_the_query_with_the_way_out(service, make):
    trial = make(order="epoch")
    receipts = prepared(trial)
    service.answers = lambda request, body: 422 if json.loads(body)["id"] == 2 else None
    with pytest.raises(RowRejected, match=r"-e0-p0-[a-z2-7]{8}-c2: POST .* answered 422") as caught:
        trial.commit(0, *receipts)
    assert "epochal resolve give-up" in caught.value.hint
    assert trial.committer().newest() == []
    service.answers = lambda request, body: None
    trial.commit(0, *receipts)
    assert trial.ids() == [*range(5), *range(10, 15)]


def test_rows_that_are_refused_for_good_can_be_kept_aside(service, make, tmp_path):
    trial = make(on_reject="keep")
    receipts = prepared(trial)
    service.answers = lambda request, body: 422 if json.loads(body)["id"] in (2, 13) else None
    trial.commit(0, *receipts)
    assert trial.ids() == [0, 1, 3, 4, 10, 11, 12, 14]
    kept = [json.loads(path.read_bytes()) for path in (tmp_path / "rejected").rglob("*.json")]
    assert sorted(row["id"] for one in kept for row in one["rows"]) == [2, 13]
    assert all("422" in one["because"] for one in kept)


def test_the_meaning_of_a_status_can_be_declared(service, make):
    trial = make(statuses={409: "ok"})
    service.answers = lambda request, body: 409
    trial.commit(0, trial.prepare(0, trial.batch(1)))
    assert list(service.calls.values()) == [1]
    with pytest.raises(Misconfigured, match="statuses"):
        make(statuses={409: "perhaps"})


@pytest.mark.parametrize("status", [301, 401, 403, 404])
def test_what_no_row_can_help_stops_and_shows_no_secret(service, tmp_path, status):
    url = service.url.replace("//", "//user:hunter2@") + "?key=hunter3"
    options = {"token": "hunter4", "headers": {"X-Api-Key": "hunter5"}, "on_reject": "keep"}
    sink = Http(url, mode="idempotency-key", spool=tmp_path, **options)
    trial = Trial(Target(sink=sink, visible=service.rows))
    service.answers = lambda request, body: status
    with pytest.raises(Misconfigured) as caught:
        trial.commit(0, trial.prepare(0, trial.batch(1)))
    trial.close()
    shown = "".join(traceback.format_exception(caught.value)) + repr(sink) + str(sink.describe())
    assert str(status) in shown
    assert "hunter" not in shown
    assert service.headers[0]["Authorization"] == "Bearer hunter4"
    assert service.headers[0]["X-Api-Key"] == "hunter5"
    assert caught.value.hint


def test_retry_after_is_honoured(service, make, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr("epochal.sinks.http.client._retry_after_s", lambda answer: 7.0)
    trial = make(retries_max=2, retry_after_max_s=5.0)
    left = [429]
    service.answers = lambda request, body: left.pop() if left else None
    committer = trial.sink._spool_committer(trial.identity(), trial.target.limits)
    committer._delivery._client._sleep = waited.append
    committer.commit(0, [trial.prepare(0, trial.batch(1))])
    committer.close()
    assert waited == [5.0]
