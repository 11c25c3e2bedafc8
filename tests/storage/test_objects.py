"""What a store in a bucket makes of a server that fails."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage import open_store
from epochal.storage.objects import PROBE, open_at

if TYPE_CHECKING:
    from epochal.storage import Store

PLACE = "s3://bucket/chk/epochal/log"
Verb = Callable[["Store"], object]
READS: list[Verb] = [
    lambda store: store.names(),
    lambda store: store.read("k1"),
    lambda store: store.entry("k1"),
    lambda store: store.folders("f"),
    lambda store: store.delete(["k1"]),
]
PUTS: list[Verb] = [
    lambda store: store.put_if_absent("k2", b"y"),
    lambda store: store.put("k2", b"y"),
]
ALL_VERBS: list[Verb] = [*PUTS, *READS]


@pytest.fixture
def store(s3: Any) -> Store:
    store = open_store(PLACE)
    store.put_if_absent("k1", b"x")
    return store


def _answering(status: int, code: str = "") -> Callable[[Any], bool]:
    def answer(request: Any) -> bool:
        request.answer(status, f"<Error><Code>{code}</Code></Error>".encode())
        return True

    return answer


def _dropping(request: Any) -> bool:
    """Hang up without an answer."""
    request.close_connection = True
    return True


def _storing_and_dropping(request: Any) -> bool:
    """Do what was asked, and hang up before the answer."""
    if request.command != "PUT":
        return False
    request.store(request.body)
    return _dropping(request)


@pytest.mark.parametrize("fault", [_answering(503), _answering(500), _dropping])
def test_a_put_without_an_answer_has_an_unknown_outcome(
    s3: Any, store: Store, fault: Callable[[Any], bool]
) -> None:
    s3.fault = fault
    with pytest.raises(OutcomeUnknown, match=PLACE):
        store.put_if_absent("k2", b"y")


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("fault", [_answering(503), _dropping])
def test_a_question_without_an_answer_may_be_asked_again(
    s3: Any, store: Store, fault: Callable[[Any], bool], verb: Verb
) -> None:
    s3.fault = fault
    with pytest.raises(TryAgain, match=PLACE):
        verb(store)


def test_a_put_whose_answer_was_lost_is_found_by_asking_again(s3: Any, store: Store) -> None:
    s3.fault = _storing_and_dropping
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("k2", b"mine")
    s3.fault = lambda request: False
    assert store.put_if_absent("k2", b"mine") is False
    assert store.read("k2") == b"mine"


def test_two_puts_that_met_are_not_taken_for_a_filled_slot(s3: Any, store: Store) -> None:
    s3.fault = _answering(409, "ConditionalRequestConflict")
    with pytest.raises(OutcomeUnknown):
        store.put_if_absent("k2", b"y")
    s3.fault = lambda request: False
    assert store.read("k2") is None
    assert store.put_if_absent("k2", b"y") is True


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_refused_credentials_are_for_a_person(s3: Any, store: Store, verb: Verb) -> None:
    s3.fault = _answering(403, "AccessDenied")
    with pytest.raises(Misconfigured) as caught:
        verb(store)
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


@pytest.mark.parametrize("verb", [PUTS[0], READS[0]])
def test_a_missing_bucket_is_for_a_person(s3: Any, verb: Verb) -> None:
    s3.fault = _answering(404, "NoSuchBucket")
    with pytest.raises(Misconfigured, match="NoSuchBucket"):
        verb(open_store(PLACE))


@pytest.mark.parametrize("verb", [PUTS[0], READS[0]])
def test_a_wrong_region_is_for_a_person(s3: Any, verb: Verb) -> None:
    s3.fault = _answering(301)
    with pytest.raises(Misconfigured) as caught:
        verb(open_store(PLACE))
    assert "AWS_REGION" in caught.value.hint


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_no_error_shows_a_secret(s3: Any, verb: Verb) -> None:
    s3.fault = _answering(403, "AccessDenied")
    store = open_store("s3://somebody:hunter2@bucket/chk?X-Amz-Signature=hunter2")
    with pytest.raises(EpochalError) as caught:
        verb(store)
    shown = "".join(traceback.format_exception(caught.value)) + store.location
    assert "hunter2" not in shown
    assert "/chk" in store.location


def test_a_store_that_ignores_the_condition_is_refused_before_the_first_record(s3: Any) -> None:
    s3.honours_conditions = False
    with pytest.raises(Misconfigured, match="overwrites"):
        open_store(PLACE).put_if_absent("k1", b"x")
    assert list(s3.objects) == [f"chk/epochal/log/{PROBE}"]


def test_a_store_is_asked_for_its_ability_once_a_log(s3: Any, store: Store) -> None:
    puts = []
    s3.fault = lambda request: bool(puts.append(request.key)) if request.command == "PUT" else False
    store.put_if_absent("k2", b"y")
    again = open_store(PLACE)
    again.put_if_absent("k3", b"z")
    assert [key.rpartition("/")[2] for key in puts] == [
        "k2",
        PROBE,
        "k3",
    ]


def test_objects_of_neighbours_and_hidden_ones_are_not_listed(s3: Any, store: Store) -> None:
    for key in ("chk/epochal/logs/k8", "chk/epochal/log/deeper/k9", "chk/epochal/log/.hidden"):
        s3.objects[key] = b"not ours"
    assert list(store.names()) == ["k1"]
    assert list(store.folders()) == ["deeper"]


@pytest.mark.parametrize(("has_worked", "kind"), [(False, Misconfigured), (True, TryAgain)])
def test_missing_credentials_are_for_a_person_unless_it_worked_before(
    monkeypatch: pytest.MonkeyPatch, s3: Any, has_worked: bool, kind: type[EpochalError]
) -> None:
    from obstore.exceptions import GenericError

    store = open_store(PLACE)
    if has_worked:
        store.names()
    message = "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token"

    def fail(*_: object) -> None:
        raise GenericError(message)

    monkeypatch.setattr("obstore.list_with_delimiter", fail)
    with pytest.raises(kind) as caught:
        store.names()
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


@pytest.mark.parametrize("url", ["s3://", "az://container/without-an-account"])
def test_a_url_that_names_no_bucket_is_refused_at_once(url: str) -> None:
    with pytest.raises(Misconfigured, match="no object store opens at"):
        open_at(url)
