"""Cables are cut, the receiver dies, answers are odd: every row is there once afterwards."""

from __future__ import annotations

import itertools
import os
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pytest
from servers.receiver import ReceiverServer
from servers.tcp_proxy import Proxy
from sinks.http.conftest import TOKEN
from sinks.http.left import left_at

from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    RowRejected,
    TryAgain,
)
from epochal.logs import MemoryLog
from epochal.sinks.http import Http
from epochal.terms import EpochNumber, Limits, Proof
from epochal.testing.driver import Checkpoint, Driver, JobFailed
from epochal.testing.trial import Target, Trial

EVERY_STEP = "EPOCHAL_EVERY_STEP" in os.environ
HURRY = Limits(retry_backoff_ms=(1,), commit_retry_max_s=3, decide_retry_max_s=3, sweep_every_s=0)
_numbers = itertools.count()


def name() -> str:
    return f"fault {next(_numbers)}"


@pytest.fixture
def trial_of(receiver):
    trials = []

    def made(url: str | None = None, **options) -> Trial:
        options = {"token": TOKEN, "name": name(), "retries_max": 0, **options}
        sink = Http(url or receiver.url, **options)
        trials.append(Trial(Target(sink=sink, visible=lambda: receiver.rows(sink.name))))
        return trials[-1]

    yield made
    for trial in trials:
        trial.close()


def rows() -> pa.Table:
    return pa.table({"id": pa.array(range(6), pa.int64()), "name": [f"n{n}" for n in range(6)]})


class Pipeline:
    """What outlives a driver: the log and the engine's checkpoint."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        self.engine = Checkpoint(["0"])

    def run(self, sink: Http) -> None:
        """One life of a driver: two tasks, the first in several parts."""
        parts = [rows().slice(0, 4).to_batches(max_chunksize=1), rows().slice(4).to_batches()]
        Driver(
            log=self.log,
            sinks=[sink],
            engine=self.engine,
            read=lambda epoch: parts,
            epochs=1,
            limits=HURRY,
            schema=rows().schema,
        ).run()

    def run_into_trouble(self, sink: Http) -> None:
        with suppress(EpochalError, JobFailed):
            self.run(sink)


def judge(receiver: ReceiverServer, sink: str) -> None:
    assert sorted(row["id"] for row in receiver.rows(sink)) == list(range(6))
    assert left_at(receiver, sink) == []


class Nth:
    """Says when the Nth piece of one direction comes by; once."""

    def __init__(self, number: int, *, to_server: bool) -> None:
        self._left = number
        self._to_server = to_server
        self._lock = threading.Lock()

    def __call__(self, piece: bytes, to_server: bool) -> str | None:
        with self._lock:
            self._left -= to_server is self._to_server
            is_it = self._left == 0 and to_server is self._to_server
            self._left -= is_it
            return "before" if is_it else None


@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_a_connection_cut_at_any_step_loses_and_doubles_nothing(receiver, proxy, to_server):
    cuts = 0
    for number in range(1, 200, 1 if EVERY_STEP else 9):
        proxy.cut_when = Nth(number + to_server, to_server=to_server)
        before, pipeline = proxy.cuts, Pipeline()
        url = f"http://127.0.0.1:{proxy.port}"
        sink = Http(url, token=TOKEN, name=name(), retries_max=0, part_bytes=20, concurrency=1)
        pipeline.run_into_trouble(sink)
        proxy.cut_when = lambda piece, to_server: None
        if proxy.cuts == before:
            break
        cuts += 1
        seen = [row["id"] for row in receiver.rows(sink.name)]
        assert len(seen) == len(set(seen))
        pipeline.run(sink)
        judge(receiver, sink.name)
    assert cuts > 1


@pytest.mark.parametrize("verdict", ["before", "after"])
@pytest.mark.parametrize("path", [b"POST /commit", b"POST /marks"])
def test_a_lost_reply_to_commit_is_settled_by_proof(trial_of, proxy, path, verdict):
    trial = trial_of(f"http://127.0.0.1:{proxy.port}")
    receipts = [trial.prepare(0, trial.batch(at), partition=at) for at in (0, 1)]
    proxy.cut_when = lambda piece, to_server: verdict if to_server and path in piece else None
    with pytest.raises(OutcomeUnknown):
        trial.commit(0, *receipts)
    proxy.cut_when = lambda piece, to_server: None
    ask = trial.committer().outcome
    assert {ask(EpochNumber(0), one) for one in receipts} <= {Proof.UNKNOWN, Proof.COMMITTED}
    trial.commit(0, *receipts)
    assert trial.ids() == [0, 1]
    assert {ask(EpochNumber(0), one) for one in receipts} == {Proof.COMMITTED}


def test_a_part_whose_reply_is_lost_is_sent_again_by_itself(trial_of, proxy):
    trial = trial_of(f"http://127.0.0.1:{proxy.port}", retries_max=2, part_bytes=20)
    proxy.cut_when = Nth(4, to_server=False)
    receipt = trial.prepare(0, trial.batch(1), trial.batch(2), trial.batch(3))
    assert proxy.cuts == 1
    trial.commit(0, receipt)
    assert trial.ids() == [1, 2, 3]


KILLS = [b"POST /prepare", b"POST /commit", b"POST /marks"]


@pytest.mark.parametrize("passes", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("word", KILLS, ids=str)
def test_a_receiver_that_is_killed_at_a_step_loses_and_doubles_nothing(mortal, word, passes):
    server, proxy = mortal
    fired = threading.Event()

    def look(piece: bytes, to_server: bool) -> str | None:
        if not to_server or word not in piece or fired.is_set():
            return None
        fired.set()
        if passes:
            threading.Timer(0.005, server.kill).start()
            return None
        server.kill()
        return "before"

    proxy.cut_when = look
    pipeline = Pipeline()
    sink = Http(f"http://127.0.0.1:{proxy.port}", name=name(), retries_max=0, connect_timeout_s=1)
    pipeline.run_into_trouble(sink)
    assert fired.wait(60)
    proxy.cut_when = lambda piece, to_server: None
    server.await_death()
    server.start()
    pipeline.run(sink)
    judge(server, sink.name)


@pytest.fixture(scope="module")
def mortal(tmp_path_factory):
    server = ReceiverServer(tmp_path_factory.mktemp("mortal"))
    server.start()
    proxy = Proxy(server.port)
    yield server, proxy
    proxy.close()
    server.kill()


def test_large_rows_go_in_parts_and_come_back_whole(trial_of, receiver):
    trial = trial_of(part_bytes=300_000)
    text = "ä" * 100_000
    batch = trial.rows([(number, text) for number in range(20)])
    receipt = trial.prepare(0, batch)
    assert receipt.token["parts"] == 10
    trial.commit(0, receipt)
    assert [row["name"] for row in receiver.rows(trial.sink.name)] == [text] * 20


def test_a_transaction_that_was_swept_while_it_was_written_is_refused(trial_of):
    trial = trial_of(part_bytes=20)
    handle = trial.handle(0)
    writer = trial.sink.writer(trial.task(handle))
    writer.write(trial.batch(1, 2))
    assert trial.handles() == {handle}
    trial.sweep()
    with pytest.raises(TryAgain, match="aborted"):
        writer.write(trial.batch(3, 4))
    assert trial.handles() == set()
    assert trial.ids() == []


def test_what_the_receiver_lost_is_reported_as_lost(trial_of):
    trial = trial_of()
    kept, gone = (trial.prepare(0, trial.batch(at), partition=at) for at in (0, 1))
    trial.abort(0, gone)
    with pytest.raises(PreparedLost) as caught:
        trial.commit(0, kept, gone)
    assert caught.value.handles == (str(gone.handle),)
    assert trial.committer().outcome(EpochNumber(0), gone) is Proof.ABORTED


class _Stranger(BaseHTTPRequestHandler):
    """Another server: answers 404, or what it is set to, to every request."""

    status, content, extra_headers = 404, b"not here", ()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.content)))
        for header in self.extra_headers:
            self.send_header(*header)
        self.end_headers()
        self.wfile.write(self.content)

    do_POST = do_GET  # noqa: N815  the names that http.server looks for

    def log_message(self, *args) -> None:
        """Quiet."""


@pytest.fixture
def other_server():
    handler = type("Stranger", (_Stranger,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}).start()
    handler.url = f"http://127.0.0.1:{server.server_port}"
    yield handler
    server.shutdown()
    server.server_close()


def test_a_404_of_another_server_is_not_a_lost_transaction(trial_of, other_server):
    trial = trial_of()
    receipt = trial.prepare(0, trial.batch(1))
    away = trial_of(other_server.url, name=trial.sink.name)
    with pytest.raises(Misconfigured, match="not by the receiver"):
        away.commit(0, receipt)
    assert away.committer().outcome(EpochNumber(0), receipt) is Proof.UNKNOWN


def test_a_service_that_is_no_receiver_is_refused_at_the_start(trial_of, other_server):
    other_server.status, other_server.content = 200, b'{"protocol": "another"}'
    with pytest.raises(Misconfigured, match="is no receiver") as caught:
        trial_of(other_server.url).committer().check(None)
    assert "idempotency-key" in caught.value.hint


@pytest.mark.parametrize(
    ("status", "error"),
    [(302, Misconfigured), (401, Misconfigured), (403, Misconfigured), (404, Misconfigured),
     (413, RowRejected), (422, RowRejected), (429, TryAgain), (500, TryAgain), (503, TryAgain)],
)  # fmt: skip
def test_answers_are_sorted_by_what_may_be_done_next(trial_of, other_server, status, error):
    other_server.status, other_server.content = status, f"the token is {TOKEN}".encode()
    with pytest.raises(error, match=str(status)) as caught:
        trial_of(other_server.url).prepare(0, trial_of().batch(1))
    said = "".join(traceback.format_exception(caught.value))
    assert TOKEN not in said
    assert error is not Misconfigured or caught.value.hint


@pytest.mark.parametrize("status", [500, 502, 504])
def test_a_commit_that_was_answered_with_5xx_may_have_happened(trial_of, other_server, status):
    trial = trial_of()
    receipt = trial.prepare(0, trial.batch(1))
    other_server.status = status
    with pytest.raises(OutcomeUnknown, match=str(status)):
        trial_of(other_server.url, name=trial.sink.name).commit(0, receipt)


def test_a_200_of_another_server_is_not_a_commit(trial_of, other_server):
    """As a page for maintenance is sent."""
    trial = trial_of()
    receipt = trial.prepare(0, trial.batch(1))
    other_server.status, other_server.content = 200, b"<html>back in a minute</html>"
    away = trial_of(other_server.url, name=trial.sink.name)
    for receipts in ([receipt], []):
        with pytest.raises(OutcomeUnknown, match="something else than the receiver: <html>"):
            away.commit(0, *receipts)
    with pytest.raises(OutcomeUnknown, match="abort of"):
        away.abort(0, receipt)
    assert away.committer().outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
    with pytest.raises(TryAgain, match="no transactions"):
        away.sweep()
    trial.commit(0, receipt)
    assert trial.ids() == [1]


def test_an_answer_that_can_not_be_unpacked_leaves_open_what_happened(trial_of, other_server):
    trial = trial_of()
    receipt = trial.prepare(0, trial.batch(1))
    other_server.status, other_server.extra_headers = 200, [("Content-Encoding", "gzip")]
    with pytest.raises(OutcomeUnknown, match="DecodingError"):
        trial_of(other_server.url, name=trial.sink.name).commit(0, receipt)


def test_a_service_that_is_slow_is_not_waited_for_longer_than_its_timeout(trial_of, proxy):
    trial = trial_of()
    receipt = trial.prepare(0, trial.batch(1))
    moment = threading.Event()
    proxy.cut_when = lambda piece, to_server: moment.wait(0.6) and None
    hurried = trial_of(f"http://127.0.0.1:{proxy.port}", name=trial.sink.name, timeout_s=0.2)
    with pytest.raises(OutcomeUnknown, match="ReadTimeout"):
        hurried.commit(0, receipt)
    proxy.cut_when = lambda piece, to_server: None


def test_a_wrong_token_is_reported_without_the_token(trial_of):
    trial = trial_of(token="hunter5")
    with pytest.raises(Misconfigured, match="401") as caught:
        trial.committer().check(None)
    said = "".join(traceback.format_exception(caught.value))
    assert "hunter5" not in said + repr(trial.sink)
    assert "token=" in caught.value.hint


def test_a_token_is_read_anew_for_every_request(trial_of, monkeypatch):
    from epochal import env

    trial = trial_of(token=env("RECEIVER_TOKEN"))
    monkeypatch.setenv("RECEIVER_TOKEN", TOKEN)
    committer = trial.committer()
    committer.check(None)
    monkeypatch.setenv("RECEIVER_TOKEN", "another")
    committer.check(None)
    monkeypatch.setenv("RECEIVER_TOKEN", "no longer")
    with pytest.raises(Misconfigured, match="401"):
        committer.check(None)


def test_columns_that_json_has_no_form_for_are_refused_at_the_start(trial_of):
    schema = pa.schema([pa.field("gap", pa.month_day_nano_interval())])
    with pytest.raises(Misconfigured, match="column 'gap'"):
        trial_of().committer().check(schema)


def test_parts_that_the_receiver_would_not_take_are_refused_at_the_start(trial_of):
    with pytest.raises(Misconfigured, match="part_bytes") as caught:
        trial_of(part_bytes=10**9).committer().check(None)
    assert "part_bytes=" in caught.value.hint


@pytest.mark.parametrize(
    "options",
    [{"mode": "perhaps"}, {"format": "xml"}, {"concurrency": 0}, {"on_reject": "x"}],
    ids=str,
)
def test_options_that_can_not_be_are_refused(options):
    with pytest.raises(Misconfigured):
        Http("http://localhost", **options)


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://[", "http://host?a=hunter2"])
def test_urls_that_can_not_be_are_refused_without_being_quoted(url):
    with pytest.raises(Misconfigured) as caught:
        Http(url)
    assert "hunter2" not in str(caught.value)


def test_a_changed_copy_keeps_the_password_of_its_url():
    sink = replace(Http("http://user:hunter2@host/x", token="hunter3"), name="another")
    assert sink.service.user[1].reveal() == "hunter2"
    assert sink.service.token.reveal() == "hunter3"
    assert "hunter" not in repr(sink)
    assert sink.target == "http://host/x"
