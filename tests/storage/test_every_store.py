"""The promises of `Store`, judged the same way for every back end."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from epochal.errors import TryAgain
from epochal.storage import FileStore, ScannedStore, Store
from epochal.storage.memory import MemoryStore

RACERS = 6
KEYS = [f"race/{number:02d}" for number in range(8)]
ODD_KEYS = [
    "plain.json",
    "with space",
    "ünïcode-日本-🦆",
    "per%cent%20",
    "a+b&c=d;e",
    "quo'te\"s",
    "brackets[1]{2}(3)",
    "hash#mark?query",
    "comma, space",
    "a/b/c/d/e/f/g/h/i/j/k/deep",
    "_epochal/prepared/h.ü",
    "day=2026-01-31/part",
    "trailing.",
    "tilde~under_score",
]
Opener = Callable[[], Store]


def race(open_one: Opener, keys: Sequence[str]) -> dict[str, list[bytes]]:
    """Let threads, each with a store of its own, race for each key: which calls returned True?"""
    wins: dict[str, list[bytes]] = {key: [] for key in keys}
    stores = [open_one() for _ in range(RACERS)]
    start = threading.Barrier(RACERS)

    def run(racer: int) -> None:
        for key in keys:
            start.wait()
            content = b"racer %d" % racer
            if stores[racer].put_if_absent(key, content):
                wins[key].append(content)
            else:
                assert stores[racer].read(key) is not None, "exists, and can't be read"

    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wins


def judge_race(wins: dict[str, list[bytes]], store: Store) -> None:
    for key, winners in wins.items():
        assert len(winners) == 1, f"{key} was won by {winners}"
        assert store.read(key) == winners[0]
    assert [f"race/{name}" for name in store.names("race")] == sorted(wins)


class LastOneWins(MemoryStore):
    """What a store does that overwrites: the judge must object to it."""

    def put_if_absent(self, key: str, content: bytes) -> bool:
        self.put(key, content)
        return True


def test_a_store_that_was_never_written_is_empty(store: Store) -> None:
    assert (list(store.names()), list(store.folders()), list(store.entries())) == ([], [], [])
    assert list(store.names("a/b")) == []
    assert store.read("x") is None
    assert store.entry("x") is None
    store.delete(["x", "a/y"])
    assert list(store.names()) == []


def test_a_key_is_created_once_and_keeps_its_first_content(store: Store) -> None:
    assert store.put_if_absent("k", b"first") is True
    assert store.put_if_absent("k", b"second") is False
    assert store.read("k") == b"first"
    assert list(store.names()) == ["k"]


def test_a_put_replaces_whatever_was_there(store: Store) -> None:
    store.put("k", b"one")
    store.put("k", b"two, longer")
    store.put("k", b"3")
    assert store.read("k") == b"3"
    assert store.put_if_absent("k", b"four") is False
    assert list(store.names()) == ["k"]


def test_a_part_of_a_key_is_read_without_the_rest(store: Store) -> None:
    store.put("f/k", b"0123456789")
    assert store.read_range("f/k", 2, 5) == b"234"
    assert store.read_range("f/k", 0, 10) == b"0123456789"
    assert store.read_range("f/k", 8, 10) == b"89"
    with pytest.raises(TryAgain, match="none"):
        store.read_range("f/none", 0, 1)


def test_a_put_is_listed_and_read_by_others_at_once(reopen: Opener) -> None:
    writer, reader = reopen(), reopen()
    for number in range(4):
        writer.put_if_absent(f"r{number}", b"record %d" % number)
        writer.put(f"f/{number}", b"file")
        assert list(reader.names()) == [f"r{at}" for at in range(number + 1)]
        assert list(reader.names("f")) == [f"{at}" for at in range(number + 1)]
        assert reader.read(f"r{number}") == b"record %d" % number


def test_a_listing_shows_one_folder_and_its_folders(store: Store) -> None:
    for key in ("b", "a", "f/x", "f/g/y", "f2/z", "e/g/h/i"):
        store.put(key, b"")
    assert list(store.names()) == ["a", "b"]
    assert list(store.folders()) == ["e", "f", "f2"]
    assert (list(store.names("f")), list(store.folders("f"))) == (["x"], ["g"])
    assert (list(store.names("e")), list(store.folders("e/g"))) == ([], ["h"])
    assert list(store.names("missing")) == []


def test_the_end_of_a_long_folder_is_listed_from_a_name_on(store: Store) -> None:
    for key in ("f/1", "f/2", "f/3", "f/10", "f/5/g", "f2/9", "e/9"):
        store.put(key, b"")
    assert list(store.names("f", after="1")) == ["10", "2", "3"]
    assert list(store.names("f", after="15")) == ["2", "3"]
    assert list(store.names("f", after="3")) == []
    assert list(store.names("missing", after="3")) == []


@pytest.mark.parametrize("kind", ["etcd", "postgres"])
def test_several_keys_are_read_in_one_request(store: Store) -> None:
    assert isinstance(store, ScannedStore)
    assert store.read_after("f", "", 9) == {}
    large = random.Random(1).randbytes(3 << 20)
    contents = {"1": b"one", "10": b"ten", "2": b"", "3": large}
    for name, content in contents.items():
        store.put(f"f/{name}", content)
    for key in ("f/15/g", "f2/9", "e/9"):
        store.put(key, b"elsewhere")
    assert list(store.read_after("f", "", 9).items()) == list(contents.items())
    assert list(store.read_after("f", "", 3)) == ["1", "10", "2"]
    assert list(store.read_after("f", "1", 2)) == ["10", "2"]
    assert store.read_after("f", "2", 9) == {"3": large}
    assert store.read_after("f", "3", 9) == {}


def test_sizes_and_times_are_known(store: Store, kind: str) -> None:
    store.put("f/a", b"12345")
    store.put("f/b", b"")
    found = store.entries("f")
    assert [(entry.name, entry.size) for entry in found] == [("a", 5), ("b", 0)]
    assert store.entry("f/a") == found[0]
    if kind != "objects-s3":  # the small server has no clock
        assert all(abs(entry.modified_at - time.time()) < 60 for entry in found)


def test_a_deleted_key_is_gone_and_others_stay(store: Store) -> None:
    for key in ("a", "b", "c", "f/x"):
        store.put_if_absent(key, key.encode())
    store.delete(["a", "f/x"])
    store.delete(["a", "f/x", "never", "f/never"])
    store.delete([])
    assert list(store.names()) == ["b", "c"]
    assert list(store.folders()) == []
    assert (store.read("a"), store.read("b")) == (None, b"b")
    assert store.put_if_absent("a", b"after") is True
    assert store.put_if_absent("f/x", b"after") is True
    assert store.read("f/x") == b"after"


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 3 * 1024 * 1024])
def test_content_of_any_size_comes_back_byte_for_byte(store: Store, size: int) -> None:
    content = random.Random(size).randbytes(size)
    store.put_if_absent("once", content)
    store.put("again", content)
    assert store.read("once") == content
    assert store.read("again") == content
    assert [entry.size for entry in store.entries()] == [size, size]


def test_odd_keys_are_kept_apart_and_come_back_as_they_are(store: Store) -> None:
    for number, key in enumerate(ODD_KEYS):
        assert store.put_if_absent(key, b"%d" % number) is True, key
        assert store.put_if_absent(key, b"other") is False, key
    for number, key in enumerate(ODD_KEYS):
        folder, _, name = key.rpartition("/")
        assert store.read(key) == b"%d" % number, key
        assert name in store.names(folder), key
    store.delete(ODD_KEYS)
    assert list(store.names()) == []


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".", "a/.hidden", "a\0b"]
)
def test_what_is_not_a_key_is_refused_everywhere(store: Store, key: str) -> None:
    for call in (
        lambda: store.put(key, b""),
        lambda: store.put_if_absent(key, b""),
        lambda: store.read(key),
        lambda: store.entry(key),
        lambda: store.delete([key]),
    ):
        with pytest.raises(ValueError, match="is not a key"):
            call()


def test_a_store_beside_another_has_keys_of_its_own(reopen: Opener) -> None:
    store = reopen()
    history = store.beside("history")
    store.put("k", b"outer")
    assert (history.read("k"), list(history.names())) == (None, [])
    assert history.put_if_absent("k", b"inner") is True
    history.put("f/k", b"deeper")
    assert (store.read("k"), history.read("k")) == (b"outer", b"inner")
    assert list(store.names()) == ["k"]
    again = reopen().beside("history")
    assert (list(again.names()), list(again.folders())) == (["k"], ["f"])
    assert again.location.endswith("history")
    assert again.location.startswith(store.location)
    again.delete(["k", "f/k"])
    assert (list(history.names()), list(history.folders())) == ([], [])
    assert store.read("k") == b"outer"


def test_content_outlives_the_object_that_wrote_it(reopen: Opener) -> None:
    first = reopen()
    first.put_if_absent("k", b"kept")
    first.close()
    again = reopen()
    assert again.read("k") == b"kept"
    assert again.put_if_absent("k", b"other") is False


def test_of_many_racers_for_a_key_exactly_one_wins(reopen: Opener) -> None:
    judge_race(race(reopen, KEYS), reopen())


def test_the_judge_of_races_objects_to_a_store_that_overwrites() -> None:
    store = LastOneWins()
    wins = race(lambda: store, KEYS)
    with pytest.raises(AssertionError, match="was won by"):
        judge_race(wins, store)


def test_the_judge_of_races_objects_to_a_winner_whose_content_is_not_there() -> None:
    store = MemoryStore()
    wins = race(lambda: store, KEYS)
    store.put(KEYS[3], b"somebody else's")
    with pytest.raises(AssertionError):
        judge_race(wins, store)


def test_puts_and_deletes_beside_each_other_never_fail(reopen: Opener) -> None:
    """A folder that becomes empty may vanish while another process writes into it."""
    errors: list[Exception] = []
    stores = [reopen() for _ in range(4)]

    def run(at: int) -> None:
        try:
            for number in range(15):
                keys = [f"shared/folder/{at}-{number}", f"shared/{at}"]
                for key in keys:
                    stores[at].put(key, b"x")
                    assert stores[at].put_if_absent(key, b"y") is False
                stores[at].delete([*keys, f"shared/folder/{(at + 1) % 4}-{number + 100}"])
                assert stores[at].read(keys[0]) is None
        except Exception as error:  # noqa: BLE001  judged in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert list(stores[0].names("shared/folder")) == []


def test_a_location_shows_where_and_no_secret(store: Store) -> None:
    assert store.location
    assert "hunter2" not in store.location


@pytest.mark.parametrize("kind", ["local", "objects-memory", "objects-s3"], indirect=True)
def test_a_large_file_is_written_in_pieces_and_read_at_any_position(store: FileStore) -> None:
    store.put("f/big", b"old")
    output = store.create("f/big")
    for piece in (b"0123", memoryview(b"45"), b"", b"6789" * 1000):
        output.write(piece)
    assert store.read("f/big") == b"old"
    output.finish()
    content = b"012345" + b"6789" * 1000
    assert store.read("f/big") == content
    file = store.open("f/big")
    assert file is not None
    with file:
        assert (file.read(3), file.read(4)) == (b"012", b"3456")
        file.seek(1)
        assert file.read() == content[1:]
    assert store.open("f/other") is None


@pytest.mark.parametrize("kind", ["local", "objects-memory", "objects-s3"], indirect=True)
def test_a_large_file_that_is_given_up_changes_nothing(store: FileStore) -> None:
    store.put("k", b"old")
    for key in ("k", "new"):
        output = store.create(key)
        output.write(b"half")
        output.discard()
    assert (store.read("k"), list(store.names())) == (b"old", ["k"])
