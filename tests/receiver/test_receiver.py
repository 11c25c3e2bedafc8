"""What the receiver answers, remembers and refuses, as a client of plain HTTP sees it."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import jsonschema
import pytest
from servers.kafka import Certificates
from servers.receiver import ReceiverServer

from epochal.errors import EpochalError, Misconfigured
from epochal.receiver.handlers import load_handler
from epochal.receiver.server import Access, serve
from epochal.sinks.http import Http
from epochal.terms import EpochNumber, Generation, Identity, Uid
from epochal.testing.trial import Target, Trial

JSON = {"Content-Type": "application/x-ndjson"}
OWNER = {"pipeline": "p", "sink": "s", "run": None}
ME = Identity(pipeline="p", uid=Uid("aaaabbbbcccc"), sink="s", generation=Generation(1))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ReceiverServer(tmp_path_factory.mktemp("receiver"), body_bytes_max=1000)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url) as client:
        yield client


_attempts = iter(range(1, 1_000_000))


def txn(epoch: int = 0) -> str:
    return str(ME.handle(EpochNumber(epoch), partition=0, attempt=next(_attempts)))


def post(http, path: str, body: bytes = b"", **options):
    return http.post(path, content=body, headers=JSON, **options)


def test_a_transaction_goes_from_prepared_to_committed_and_every_step_may_be_repeated(http):
    name = txn()
    assert http.get(f"/transactions/{name}").status_code == 404
    for _ in range(2):
        result = post(http, f"/prepare/{name}", b'{"id":1}\n{"id":2}\n').json()
        assert (result["state"], result["rows"]) == ("prepared", 2)
    assert name in [one["txn"] for one in http.get("/transactions").json()["transactions"]]
    for _ in range(2):
        assert http.post(f"/commit/{name}", json=OWNER).json()["state"] == "committed"
    assert http.post(f"/abort/{name}").status_code == 409
    found = [one for one in http.get("/rows").json()["rows"] if one["txn"] == name]
    assert [one["row"] for one in found] == [{"id": 1}, {"id": 2}]


def test_what_is_prepared_can_not_be_prepared_with_other_rows(http):
    name = txn()
    post(http, f"/prepare/{name}", b'{"id":1}')
    assert post(http, f"/prepare/{name}", b'{"id":2}').status_code == 409
    http.post(f"/abort/{name}")


def test_an_abort_is_for_good_also_of_what_never_arrived(http):
    name = txn()
    for _ in range(2):
        assert http.post(f"/abort/{name}").json()["state"] == "aborted"
    late = post(http, f"/prepare/{name}", b'{"id":1}')
    assert (late.status_code, late.json()["state"]) == (409, "aborted")
    assert http.post(f"/commit/{name}", json=OWNER).json()["state"] == "aborted"


def test_parts_are_sealed_only_when_all_are_there(http):
    name = txn()
    for part in (0, 2, 0):
        post(http, f"/prepare/{name}", b'{"id":%d}' % part, params={"part": part})
    assert http.post(f"/commit/{name}", json=OWNER).json()["state"] == "open"
    for parts in (3, 10**17):  # a number is no reason to make a list of that length
        assert post(http, f"/prepare/{name}", params={"parts": parts}).status_code == 409
    post(http, f"/prepare/{name}", b'{"id":1}', params={"part": 1})
    for _ in range(2):
        result = post(http, f"/prepare/{name}", params={"parts": 3}).json()
        assert (result["state"], result["rows"]) == ("prepared", 3)
    http.post(f"/commit/{name}", json=OWNER)
    found = [one["row"]["id"] for one in http.get("/rows").json()["rows"] if one["txn"] == name]
    assert found == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"not json", "application/x-ndjson", 422),
        (b"[1]", "application/x-ndjson", 422),
        (b"not arrow", "application/vnd.apache.arrow.stream", 422),
        (b"{}", "text/csv", 415),
        (b'{"id":"%s"}' % (b"x" * 1000), "application/x-ndjson", 413),
    ],
    ids=["text", "array", "arrow", "csv", "large"],
)
def test_rows_that_can_not_be_taken_are_refused_before_the_decision(http, body, kind, status):
    name = txn()
    reply = http.post(f"/prepare/{name}", content=body, headers={"Content-Type": kind})
    assert reply.status_code == status
    assert http.get(f"/transactions/{name}").json()["state"] == "unknown"


def test_a_body_that_is_cut_short_prepares_nothing(server, http):
    name = txn()

    def half():
        yield b'{"id":1}\n'
        raise RuntimeError("the task was killed")

    with pytest.raises(RuntimeError), httpx.Client(base_url=server.url) as other:
        other.post(f"/prepare/{name}", content=half(), headers=JSON)
    assert http.get(f"/transactions/{name}").status_code == 404


def test_an_epoch_is_whole_once_it_is_marked(http):
    first, second = txn(7), txn(7)
    for name in (first, second):
        post(http, f"/prepare/{name}", b'{"id":7}')
    http.post(f"/commit/{first}", json=OWNER)
    mark = {**OWNER, "uid": ME.uid, "tag": ME.tag, "epoch": 7, "txns": [first, second]}
    assert http.post("/marks", json=mark).status_code == 409
    http.post(f"/commit/{second}", json=OWNER)
    seen = lambda whole: [  # noqa: E731  twice, with one difference
        one
        for one in http.get("/rows", params={"whole": whole}).json()["rows"]
        if one["epoch"] == 7
    ]
    assert (len(seen("false")), len(seen("true"))) == (2, 0)
    for _ in range(2):
        assert http.post("/marks", json=mark).status_code == 200
    assert len(seen("true")) == 2
    assert http.post("/marks", json={**mark, "txns": [first]}).status_code == 409
    marks = http.get("/marks", params={"pipeline": "p", "sink": "s"}).json()["marks"]
    assert marks == [{"uid": ME.uid, "epoch": 7, "run": None}]


def test_settled_epochs_are_forgotten_and_their_names_refused(http):
    other = Identity(pipeline="q", uid=Uid("ddddeeeeffff"), sink="s", generation=Generation(1))
    names = [str(other.handle(EpochNumber(at), partition=0, attempt=at)) for at in range(3)]
    life = {"uid": other.uid, "tag": other.tag}
    for epoch, name in enumerate(names):
        post(http, f"/prepare/{name}", b'{"id":1}')
        http.post(f"/commit/{name}", json=OWNER)
        http.post("/marks", json={**OWNER, "pipeline": "q", **life, "epoch": epoch, "txns": [name]})
    assert http.delete("/marks", params={**life, "below": 9}).json() == {"settled_below": 2}
    assert http.post(f"/commit/{names[0]}", json=OWNER).status_code == 410
    assert post(http, f"/prepare/{names[1]}", b'{"id":1}').status_code == 410
    assert http.post(f"/commit/{names[2]}", json=OWNER).status_code == 200
    marks = http.get("/marks", params={"pipeline": "q", "sink": "s"}).json()["marks"]
    assert [mark["epoch"] for mark in marks] == [2]
    assert len([one for one in http.get("/rows").json()["rows"] if one["txn"] in names]) == 3


def test_the_openapi_document_describes_the_real_answers(http):
    document = http.get("/openapi.json").json()
    name = txn(50)
    asked = [
        ("get", "/", {}),
        ("get", "/health", {}),
        ("post", "/prepare/{txn}", {"content": b'{"id":1}', "headers": JSON}),
        ("post", "/prepare/{txn}", {"content": b"x", "headers": JSON}),
        ("get", "/transactions", {}),
        ("get", "/transactions/{txn}", {}),
        ("post", "/rehearse", {"json": {**OWNER, "txns": [name]}}),
        ("post", "/commit/{txn}", {"json": OWNER}),
        ("post", "/commit/{txn}", {"json": {}}),
        ("post", "/abort/{txn}", {}),
        ("post", "/marks", {"json": {**OWNER, "uid": ME.uid, "tag": "x", "epoch": 1, "txns": []}}),
        ("get", "/marks", {"params": {"pipeline": "p", "sink": "s"}}),
        ("delete", "/marks", {"params": {"uid": "x", "tag": "y", "below": "1"}}),
        ("get", "/rows", {}),
        ("get", "/counts", {"params": {"uid": ME.uid, "tag": "x"}}),
    ]
    for method, path, options in asked:
        reply = http.request(method, path.format(txn=name), **options)
        result = document["paths"][path][method]["responses"][str(reply.status_code)]
        schema = result["content"]["application/json"]["schema"]
        jsonschema.validate(reply.json(), {**document["components"], **_inlined(schema, document)})
    paths = {(method, path) for path, verbs in document["paths"].items() for method in verbs}
    assert paths == {(method, path) for method, path, _ in asked}


def _inlined(schema, document):
    """References resolved, as far as this document has them."""
    if isinstance(schema, dict) and "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _inlined(document["components"]["schemas"][name], document)
    if isinstance(schema, dict):
        return {key: _inlined(value, document) for key, value in schema.items()}
    return [_inlined(one, document) for one in schema] if isinstance(schema, list) else schema


# Handlers


@pytest.fixture
def handled(tmp_path, monkeypatch):
    """A receiver with a handler, and a sink that writes to it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    servers = []

    def made(handler: str) -> tuple[ReceiverServer, Trial]:
        server = ReceiverServer(tmp_path, handler=f"receiver.taking:{handler}", keeps_rows=False)
        server.start()
        trial = Trial(Target(sink=Http(server.url, name="handled"), visible=list))
        servers.append((server, trial))
        return server, trial

    yield made
    for server, trial in servers:
        trial.close()
        server.kill()


def orders(server: ReceiverServer) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(server.folder / "receiver.sqlite")) as db:
        is_there = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'orders'").fetchone()
        return db.execute("SELECT * FROM orders ORDER BY id").fetchall() if is_there else []


def test_a_handler_takes_rows_in_the_transaction_that_commits_them(handled):
    server, trial = handled("into_orders")
    receipt = trial.prepare(0, trial.batch(1, 2))
    trial.committer().rehearse(EpochNumber(0), [receipt])
    assert orders(server) == []
    for _ in range(2):
        trial.commit(0, receipt)
    assert orders(server) == [(1, "row 1"), (2, "row 2")]
    assert server.get("/rows")["rows"] == []


def test_what_a_handler_refuses_fails_before_the_decision(handled):
    server, trial = handled("into_orders")
    trial.commit(0, trial.prepare(0, trial.batch(1)))
    again = trial.prepare(1, trial.batch(1))
    with pytest.raises(Misconfigured, match="UNIQUE constraint failed"):
        trial.committer().rehearse(EpochNumber(1), [again])
    trial.abort(1, again)
    assert orders(server) == [(1, "row 1")]


def test_a_handler_can_not_end_the_transaction(handled):
    _, trial = handled("commits_itself")
    receipt = trial.prepare(0, trial.batch(1))
    with pytest.raises(Misconfigured, match="not authorized"):
        trial.committer().rehearse(EpochNumber(0), [receipt])


@pytest.mark.parametrize("name", ["nothing", "no.such:thing", "json:no_such", "json:__name__"])
def test_a_handler_that_is_none_is_refused(name):
    with pytest.raises(Misconfigured):
        load_handler(name)


# Who may ask


def test_nobody_asks_without_a_token_where_there_is_one(tmp_path):
    server = ReceiverServer(tmp_path, tokens=("one", "two"))
    server.start()
    try:
        for token, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            assert httpx.get(f"{server.url}/rows", headers=headers).status_code == status
        assert httpx.get(f"{server.url}/health").status_code == 200
    finally:
        server.kill()


def test_the_receiver_does_not_listen_to_the_world_for_everybody(tmp_path):
    with pytest.raises(Misconfigured, match="without asking for credentials"):
        serve(tmp_path, host="0.0.0.0", port=0, access=Access(), ready=print)


def test_certificates_say_who_asks_and_who_answers(tmp_path):
    made = Certificates(tmp_path)
    key = tmp_path / "server.key"
    tls = {"certificate": made.server, "key": key, "client_ca": made.ca}
    server = ReceiverServer(tmp_path / "data", tls={k: str(v) for k, v in tls.items()})
    server.start()
    url = server.url.replace("127.0.0.1", "localhost")
    ours = {"certificate": made.client, "key": made.client_key}
    trials = {
        "known": Http(url, ca=made.ca, name="x", retries_max=0, **ours),
        "unknown": Http(url, ca=made.ca, name="x", retries_max=0),
        "distrusting": Http(url, name="x", retries_max=0, **ours),
    }
    try:
        for result, sink in trials.items():
            trial = Trial(Target(sink=sink, visible=list))
            if result == "known":
                trial.commit(0, trial.prepare(0, trial.batch(1)))
            else:
                with pytest.raises(EpochalError, match=r"(?i)certificate|ReadError|RemoteProtocol"):
                    trial.committer().check(None)
            trial.close()
    finally:
        server.kill()


def test_the_command_prints_its_address_and_stops_on_a_signal(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "epochal.cli", "receiver", "--data", tmp_path, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        assert httpx.get(url).json()["protocol"] == "epochal-two-phase"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert (tmp_path / "receiver.sqlite").exists()
