"""What only etcd does: leaders that die, quotas, tokens, certificates, contents in parts."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial

import grpc
import pytest
from servers.etcd import NEW, EtcdCluster, running_etcd

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.etcd import EtcdStore
from epochal.storage.etcd_client import EtcdClient, Reply, address_of, past, range_of

LARGE = 3_000_000
SECRET = "hunter2"
WRITERS = 3
ANSWERED_MIN = 50


@pytest.fixture
def prefix() -> str:
    return f"tests/{uuid.uuid4().hex}"


@pytest.fixture
def store(etcd: EtcdCluster, prefix: str) -> Iterator[EtcdStore]:
    opened = EtcdStore(etcd.url(prefix))
    yield opened
    opened.close()


class Lost(grpc.RpcError):
    """What grpc raises where a connection ends after a request was sent."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Socket closed"


class Killed(BaseException):
    """The process ends here."""


def fail_at(
    client: EtcdClient, call: int, failure: BaseException, *, is_executed: bool
) -> Callable[[], bool]:
    """Make the request of this number fail, before or after it was executed: did it come to it?"""
    ask, met = client._ask, itertools.count(1)
    has_failed = False

    def ask_or_fail(*arguments: object, **named: object) -> Reply:
        nonlocal has_failed
        number = next(met)
        if number == call and not is_executed:
            has_failed = True
            raise failure
        reply = ask(*arguments, **named)  # type: ignore[arg-type]
        if number == call:
            has_failed = True
            raise failure
        return reply

    client._ask = ask_or_fail  # type: ignore[assignment]
    return lambda: has_failed


def leftovers(store: EtcdStore, key: str) -> list[int]:
    """The leases of all parts that are below a key."""
    start = store._parts(key)
    found, _ = store.client.range(range_of(start, past(start), keys_only=True))
    return [one.lease for one in found]


# URLs


def test_an_address_is_read_from_the_url_and_etcdctls_variables():
    read = address_of("etcd://a,b:1,[::1]:2/x/y/", {"ETCDCTL_USER": "me:" + SECRET})
    assert read.endpoints == ("a:2379", "b:1", "[::1]:2")
    assert (read.prefix, read.has_tls, read.user, read.password) == ("/x/y", False, "me", SECRET)
    read = address_of("etcds://u%40v:p%2Fw@a/x", {"ETCDCTL_USER": "other", "ETCDCTL_PASSWORD": "p"})
    assert (read.has_tls, read.user, read.password) == (True, "u@v", "p/w")
    assert address_of("etcd://u@a/x", {"ETCDCTL_PASSWORD": SECRET}).password == SECRET
    assert SECRET not in f"{read!r} {read.location}"


@pytest.mark.parametrize(
    "url",
    [
        "etcd://a",
        "etcd://a/",
        "etcd:///x",
        "etcd://a:b:c/x",
        f"etcd://u:{SECRET}@/x",
        "etcd://a/x//y",
    ],
)
def test_a_url_that_names_no_cluster_or_prefix_is_refused_without_its_secrets(url):
    with pytest.raises(Misconfigured, match="names no prefix") as refused:
        EtcdStore(url)
    assert SECRET not in str(refused.value)


# Contents in parts


def test_a_large_content_read_in_ranges_fetches_only_the_parts_it_needs(store, monkeypatch):
    content = random.Random(1).randbytes(LARGE)
    store.put("big", content)
    asked: list[str] = []
    ask = store.client.call
    monkeypatch.setattr(
        store.client, "call", lambda name, *a, **k: (asked.append(name), ask(name, *a, **k))[1]
    )
    part = 1 << 20
    for start, end in ((0, 5), (part - 2, part + 2), (LARGE - 3, LARGE), (part, 2 * part)):
        asked.clear()
        assert store.read_range("big", start, end) == content[start:end]
        assert len(asked) <= 3, "more parts than needed"


def test_parts_of_replaced_and_deleted_contents_are_gone(store):
    for size in (LARGE, LARGE // 2, 10, LARGE):
        store.put("k", b"x" * size)
        assert len(leftovers(store, "k")) == (-(-size // (1 << 20)) if size > 1 << 20 else 0)
    assert leftovers(store, "k") == [0, 0, 0], "parts of a key that is there must not expire"
    assert store.put_if_absent("k", b"y" * LARGE) is False
    assert leftovers(store, "k") == [0, 0, 0], "the loser removes its own parts, and no others"
    store.delete(["k"])
    assert (leftovers(store, "k"), store.read("k")) == ([], None)


@pytest.mark.parametrize("verb", ["put", "put_if_absent"])
@pytest.mark.parametrize("is_executed", [False, True])
def test_a_large_content_whose_writer_dies_at_any_request_is_whole_or_absent(
    etcd, prefix, verb, is_executed
):
    whole = random.Random(2).randbytes(LARGE)
    after = EtcdStore(etcd.url(prefix))
    for call in itertools.count(1):
        key = f"k{call}"
        writer = EtcdStore(etcd.url(prefix))
        has_failed = fail_at(writer.client, call, Killed(), is_executed=is_executed)
        with suppress(Killed):
            getattr(writer, verb)(key, whole)
        writer.close()
        found = after.read(key)
        assert found in (None, whole), "torn"
        expected = bool(found)
        assert all(bool(lease) is not expected for lease in leftovers(after, key)), (
            "parts of a key that is there would expire, or those of nobody stay"
        )
        assert after.put_if_absent(key, whole) is not expected
        assert after.read(key) == whole
        after.delete([key])
        assert leftovers(after, key) == []
        if not has_failed():
            break
    after.close()
    assert call == 6, "a lease, three parts and the transaction"


@pytest.mark.parametrize("verb", ["put", "put_if_absent"])
@pytest.mark.parametrize("size", [10, LARGE])
def test_a_put_whose_answer_is_lost_at_any_request_is_asked_again_and_knows_its_own(
    etcd, prefix, verb, size
):
    content = random.Random(3).randbytes(size)
    for call in itertools.count(1):
        store = EtcdStore(etcd.url(prefix))
        has_failed = fail_at(store.client, call, Lost(), is_executed=True)
        assert getattr(store, verb)(f"k{call}", content) in (None, True)
        assert store.read(f"k{call}") == content
        assert set(leftovers(store, f"k{call}")) <= {0}
        store.close()
        if not has_failed():
            break


def test_a_put_that_was_sent_and_never_answered_is_unknown_and_one_never_sent_is_not(
    store, monkeypatch
):
    store.client.call_max_s = 0.2
    ask = store.client._ask

    def executed_and_lost(*arguments: object) -> Reply:
        ask(*arguments)
        raise Lost

    monkeypatch.setattr(store.client, "_ask", executed_and_lost)
    with pytest.raises(OutcomeUnknown, match="Socket closed"):
        store.put_if_absent("k", b"x")
    with pytest.raises(TryAgain, match="Socket closed"):
        store.read("k")
    with pytest.raises(TryAgain, match="Socket closed"):
        store.put_if_absent("large", b"x" * LARGE)  # no key names its parts yet
    monkeypatch.undo()
    assert (store.read("k"), store.read("large")) == (b"x", None)
    nowhere = EtcdStore("etcd://127.0.0.1:1/x")
    nowhere.client.call_max_s = 0.2
    with pytest.raises(TryAgain, match="cannot write to etcd:"):
        nowhere.put_if_absent("k", b"x")


def test_parts_that_are_deleted_under_their_writer_leave_no_torn_key(store):
    put_parts = store._put_parts

    def deleted_meanwhile(key: str, *rest: object) -> list[bytes]:
        paths: list[bytes] = put_parts(key, *rest)
        store.delete([key])
        return paths

    store._put_parts = deleted_meanwhile
    for verb in (store.put, store.put_if_absent):
        with pytest.raises(TryAgain, match="were deleted while they were written"):
            verb("k", b"x" * LARGE)
    assert store.read("k") is None
    assert leftovers(store, "k") == []


def test_a_content_too_large_for_a_transaction_is_refused_before_anything_is_written(store):
    with pytest.raises(Misconfigured, match="takes 104857600 in a transaction"):
        store.put("k", bytes((100 << 20) + 1))
    assert leftovers(store, "k") == []


# Faults of the cluster


class Account:
    """Every put of every writer, and what came of it."""

    def __init__(self, cluster: EtcdCluster, prefix: str) -> None:
        self._stores = [EtcdStore(cluster.url(prefix)) for _ in range(WRITERS)]
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(at,)) for at in range(WRITERS)]
        self.won: list[dict[str, bytes]] = [{} for _ in range(WRITERS)]
        self.lost: list[set[str]] = [set() for _ in range(WRITERS)]
        self.unknown = 0
        self.refused = 0

    def __enter__(self) -> Account:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        for store in self._stores:
            store.close()

    def _write(self, at: int) -> None:
        """As the journal does it: the same content into the same slot until there is an answer."""
        for number in itertools.count():
            key, content = f"{number:06d}", os.urandom(16)
            while True:
                try:
                    is_mine = self._stores[at].put_if_absent(key, content)
                    break
                except OutcomeUnknown:
                    self.unknown += 1
                except TryAgain:
                    self.refused += 1
            if is_mine or self._stores[at].read(key) == content:
                self.won[at][key] = content
            else:
                self.lost[at].add(key)
            if self._end.is_set():
                return

    def await_wins(self, count: int) -> None:
        """Until so many puts were answered: the faults prove something of these."""
        deadline = time.monotonic() + 120
        while sum(map(len, self.won)) < count:
            assert time.monotonic() < deadline, "too few puts are answered"
            time.sleep(0.05)

    def judge(self, store: EtcdStore) -> None:
        """Every slot that was answered has one winner, and holds its content."""
        names = store.names()
        for key in set().union(*self.won, *self.lost):
            winners = [won[key] for won in self.won if key in won]
            assert len(winners) == 1 or not all(
                key in won or key in lost for won, lost in zip(self.won, self.lost, strict=True)
            ), f"{key} was won by {len(winners)}"
            assert len(winners) <= 1, f"{key} was won by {winners}"
            assert key in names, f"{key} was answered and is gone"
            if winners:
                assert store.read(key) == winners[0], f"{key} has changed"


def torment(cluster: EtcdCluster, prefix: str, faults: int, seed: int) -> Account:
    """Kill the leader, or stop it for longer than an election takes, while writers race."""
    chance = random.Random(seed)
    with Account(cluster, prefix) as account:
        for fault in range(faults):
            leader = await_leader(cluster)
            if fault % 2:
                leader.pause()
                time.sleep(chance.uniform(1.5, 2.5))
                leader.resume()
            else:
                leader.kill()
                time.sleep(chance.uniform(0.2, 1.0))
                leader.start()
        account.await_wins(ANSWERED_MIN)
    return account


def await_leader(cluster: EtcdCluster):
    deadline = time.monotonic() + 60
    while (leader := cluster.leader()) is None:
        assert time.monotonic() < deadline, "no leader is elected"
        time.sleep(0.05)
    return leader


def test_every_put_is_accounted_for_while_leaders_are_killed_and_stopped(etcd_trio, prefix):
    account = torment(etcd_trio, prefix, faults=4, seed=5)
    account.judge(EtcdStore(etcd_trio.url(prefix)))


@pytest.mark.proof
def test_every_put_is_accounted_for_over_many_kills_and_stops(etcd_trio, prefix):
    for seed in range(8):
        account = torment(etcd_trio, f"{prefix}/{seed}", faults=8, seed=seed)
        account.judge(EtcdStore(etcd_trio.url(f"{prefix}/{seed}")))


def test_the_judge_of_puts_objects_to_a_lost_and_to_a_changed_one(etcd_trio, prefix):
    store = EtcdStore(etcd_trio.url(prefix))
    with Account(etcd_trio, prefix) as account:
        while len(store.names()) < 3:
            time.sleep(0.05)
    account.judge(store)
    content = store.read("000001")
    assert content is not None
    store.put("000001", b"other")
    with pytest.raises(AssertionError, match="has changed"):
        account.judge(store)
    store.put("000001", content)
    store.delete(["000002"])
    with pytest.raises(AssertionError, match="is gone"):
        account.judge(store)


def test_a_member_that_is_lost_for_good_costs_nothing_and_a_majority_everything(prefix):
    with running_etcd(size=3, suite=NEW) as cluster, ExitStack() as stack:
        store = EtcdStore(cluster.url(prefix))
        stack.callback(store.close)
        assert store.put_if_absent("a", b"1") is True
        cluster.nodes[0].kill()  # the one that the store asks first
        assert store.put_if_absent("b", b"2") is True
        assert list(store.names()) == ["a", "b"]
        checks = {one.name: one for one in store.check()}
        assert not checks[cluster.nodes[0].endpoint].granted
        assert checks[cluster.nodes[1].endpoint].granted
        cluster.nodes[1].kill()
        store.client.call_max_s = 2.0
        with pytest.raises((TryAgain, OutcomeUnknown)):
            store.put_if_absent("c", b"3")
        with pytest.raises(TryAgain):
            store.names()
        cluster.nodes[1].launch()
        cluster.nodes[1].await_ready()
        # It may be there already: the put without an answer is closed by the same put again.
        while True:
            try:
                store.put_if_absent("c", b"3")
                break
            except EpochalError:
                time.sleep(0.2)
        assert store.read("c") == b"3"


def test_a_full_cluster_refuses_writes_with_the_way_out_and_still_reads(prefix):
    with running_etcd(options=["--quota-backend-bytes=4194304"]) as cluster:
        store = EtcdStore(cluster.url(prefix))
        store.put_if_absent("first", b"kept")
        with pytest.raises(TryAgain, match="database space exceeded") as refused:
            list(map(partial(store.put, "again"), [os.urandom(1_000_000)] * 100))
        assert "etcdctl alarm disarm" in refused.value.hint
        assert store.read("first") == b"kept"
        assert any(one.name == "alarms" and "NOSPACE" in one.because for one in store.check())
        with pytest.raises(TryAgain):
            store.put_if_absent("second", b"not yet")
        assert store.read("second") is None
        status = next(iter(store.client.ask_each("Maintenance/Status")))[1]
        assert isinstance(status, Reply)
        cluster.etcdctl("compact", str(status.part(1).number(3)))
        cluster.etcdctl("defrag")
        cluster.etcdctl("alarm", "disarm")
        assert store.put_if_absent("second", b"now") is True
        assert all(one.granted for one in store.check()), store.check()
        store.close()


def test_listings_and_large_reads_are_whole_while_the_history_is_compacted(store, etcd):
    for number in range(1005):
        store.put(f"f/{number:04d}", b"x")
    content = random.Random(4).randbytes(LARGE)
    store.put("big", content)
    end = threading.Event()

    def compact() -> None:
        other = EtcdStore(etcd.url("tests/elsewhere"))
        while not end.is_set():
            other.put("k", b"")
            reply = other.client.call("KV/Range", range_of(b"/k"), "read from")
            revision = reply.part(1).number(3)
            etcd.etcdctl("compact", str(revision))
        other.close()

    thread = threading.Thread(target=compact)
    thread.start()
    try:
        for _ in range(10):
            assert len(store.names("f")) == 1005
            assert store.read("big") == content
            assert list(store.folders()) == ["f"]
    finally:
        end.set()
        thread.join()
    assert any(one.because == "is compacted" for one in store.check())


# Users


def allow(cluster: EtcdCluster, store: EtcdStore, *, password: str = "") -> None:
    """Run what `grants` prints, as a person would, then switch authentication on."""
    cluster.etcdctl("user", "add", "root", "--interactive=false", answer="rootpass\n")
    cluster.etcdctl("user", "grant-role", "root", "root")
    for line in store.grants():
        program, *words = line.split()
        assert program == "etcdctl"
        how = ["--interactive=false"] if words[:2] == ["user", "add"] else []
        cluster.etcdctl(*words, *how, answer=f"{password or 'unused'}\n")
    cluster.etcdctl("auth", "enable")


def test_a_user_with_the_printed_role_reads_and_writes_its_prefix_only():
    with running_etcd(options=["--auth-token=simple"]) as cluster:
        login = f"epochal:{SECRET}"
        store = EtcdStore(cluster.url("orders", login=login))
        allow(cluster, store, password=SECRET)
        assert store.put_if_absent("k", b"x" * LARGE) is True
        store.put("k", b"y")
        assert list(store.names()) == ["k"]
        store.beside("history").put("h", b"z")
        assert all(one.granted for one in store.check())
        store.delete(["k"])
        # A server that restarts has forgotten its tokens.
        cluster.nodes[0].restart()
        assert store.put_if_absent("after", b"restart") is True
        cluster.nodes[0].restart()
        assert store.read("after") == b"restart"
        for url in (cluster.url("other", login=login), cluster.url("orders2", login=login)):
            with pytest.raises(Misconfigured, match="permission denied") as refused:
                EtcdStore(url).put("k", b"")
            assert "epochal grants" in refused.value.hint
        for login in (f"epochal:{SECRET}x", "", f"stranger:{SECRET}"):
            with pytest.raises(Misconfigured) as refused:
                EtcdStore(cluster.url("orders", login=login)).names()
            assert SECRET not in str(refused.value)
            assert "ETCDCTL_USER" in refused.value.hint
        store.close()


def test_a_certificate_is_a_user_and_without_one_nothing_is_answered(monkeypatch):
    with running_etcd(tls_user="root") as cluster:
        allow(cluster, EtcdStore(cluster.url("orders")))
        store = EtcdStore(cluster.url("orders"))
        assert store.put_if_absent("k", b"x" * LARGE) is True
        assert store.read("k") == b"x" * LARGE
        assert store.location.startswith("etcds://")
        store.close()
        monkeypatch.delenv("ETCDCTL_CERT")
        monkeypatch.delenv("ETCDCTL_KEY")
        stranger = EtcdStore(cluster.url("orders"))
        stranger.client.call_max_s = 1.0
        with pytest.raises(TryAgain) as refused:
            stranger.names()
        assert "ETCDCTL_CERT" in refused.value.hint
        stranger.close()
        monkeypatch.setenv("ETCDCTL_CACERT", "/nowhere/ca.pem")
        with pytest.raises(Misconfigured, match="ETCDCTL_CACERT names a file"):
            EtcdStore(cluster.url("orders")).names()
