"""Every way of connecting, against a real broker and against liars."""

from __future__ import annotations

import base64
import json
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from servers.kafka import USERS, KafkaServer
from wire import fetch, produce_code, produce_request, values

from epochal.clock import SystemClock
from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Leader, Node
from epochal.kafka.primitives import Malformed
from epochal.kafka.security import Mechanism, OAuthBearer, Plain, Scram, Security, Tls


def bearer_token(subject: str = "alice", lifetime_s: float = 3_600.0) -> str:
    """A token without a signature, which the broker's test validator takes."""
    now = SystemClock().now()
    # Not now: the broker rounds it to milliseconds, and refuses a token from the future.
    issued = now - 60

    def part(claims: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")

    return (
        f"{part({'alg': 'none'})}.{part({'sub': subject, 'iat': issued, 'exp': now + lifetime_s})}."
    )


MECHANISMS: list[Mechanism] = [
    Plain(username="alice", password=USERS["alice"]),
    Plain(username="bob", password=lambda: USERS["bob"]),
    Scram(username="alice", password=USERS["alice"], mechanism="SCRAM-SHA-256"),
    Scram(username="bob", password=lambda: USERS["bob"], mechanism="SCRAM-SHA-512"),
    OAuthBearer(token=bearer_token, extensions={"trace": "a b"}),
]
WRONG: list[Mechanism] = [
    Plain(username="alice", password="wrong-secret"),
    Scram(username="alice", password="wrong-secret", mechanism="SCRAM-SHA-256"),
    Scram(username="nobody", password="wrong-secret"),
    OAuthBearer(token=lambda: "wrong-secret"),
]


def connects(broker: KafkaServer, listener: str, security: Security) -> None:
    with Client(broker.address(listener), clock=SystemClock(), security=security) as client:
        assert client.nodes() == [Node(1)]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
@pytest.mark.parametrize("listener", ["SASL", "SASLTLS"])
def test_every_mechanism_is_let_in(
    broker: KafkaServer, listener: str, mechanism: Mechanism
) -> None:
    tls = Tls(ca_file=str(broker.certificates.ca)) if listener == "SASLTLS" else None
    connects(broker, listener, Security(tls=tls, sasl=mechanism))


@pytest.mark.parametrize("mechanism", WRONG, ids=lambda m: m.name)
def test_wrong_credentials_are_for_a_person_and_show_no_secret(
    broker: KafkaServer, mechanism: Mechanism
) -> None:
    with pytest.raises(Misconfigured) as caught:
        connects(broker, "SASL", Security(sasl=mechanism))
    assert mechanism.name in str(caught.value)
    seen = f"{caught.value!r}{caught.value}{caught.value.__cause__!r}{mechanism!r}"
    assert "wrong-secret" not in seen


def test_a_mechanism_that_is_not_offered_is_named(broker: KafkaServer) -> None:
    odd = Odd()
    with pytest.raises(Misconfigured, match=r"does not offer GSSAPI, only .*PLAIN"):
        connects(broker, "SASL", Security(sasl=odd))


class Odd:
    name = "GSSAPI"

    def exchange(self):
        yield b""


def test_tls_verifies_whom_it_talks_to(broker: KafkaServer) -> None:
    trusted = Tls(ca_file=str(broker.certificates.ca))
    connects(broker, "TLS", Security(tls=trusted))
    with pytest.raises(Misconfigured, match=r"certificate of .* is refused"):
        connects(broker, "TLS", Security(tls=Tls()))


def test_rows_travel_encrypted_with_many_requests_under_way(
    broker: KafkaServer, make_topic: Callable[..., str]
) -> None:
    topic = make_topic()
    security = Security(
        tls=Tls(ca_file=str(broker.certificates.ca)),
        sasl=Scram(username="bob", password=USERS["bob"]),
    )
    rows = [b"%d" % n * 100_000 for n in range(8)]
    with Client(broker.address("SASLTLS"), clock=SystemClock(), security=security) as client:
        asks = [Ask(request=produce_request(topic, [row]), to=Leader(topic, 0)) for row in rows]
        under_way = [client.submit(ask) for ask in asks]
        assert {produce_code(pending.result()) for pending in under_way} == {0}
        assert values(fetch(client, topic)[0]) == rows


def test_a_certificate_for_another_host_is_refused_by_default(
    broker: KafkaServer,
) -> None:
    address = f"127.0.0.1:{broker.ports['TLS']}"
    tls = Tls(ca_file=str(broker.certificates.ca))
    with (
        Client(address, clock=SystemClock(), security=Security(tls=tls)) as client,
        pytest.raises(Misconfigured, match=r"127\.0\.0\.1.*is refused"),
    ):
        client.refresh()
    careless = Security(tls=replace(tls, verify_hostname=False))
    with Client(address, clock=SystemClock(), security=careless) as client:
        client.refresh()


def test_mutual_tls_wants_a_certificate_from_us(broker: KafkaServer) -> None:
    files = broker.certificates
    tls = Tls(
        ca_file=str(files.ca),
        certificate_file=str(files.client),
        key_file=str(files.client_key),
    )
    connects(broker, "MTLS", Security(tls=tls))
    with pytest.raises(
        Misconfigured, match=r"certificate required|handshake failure|bad certificate"
    ):
        connects(broker, "MTLS", Security(tls=Tls(ca_file=str(files.ca))))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"nowhere\.pem"):
        Tls(ca_file=str(tmp_path / "nowhere.pem")).context()


def test_a_plain_client_on_a_tls_listener_is_reported_so(broker: KafkaServer) -> None:
    with (
        Client(broker.address("TLS"), clock=SystemClock()) as client,
        pytest.raises(EpochalError) as caught,
    ):
        client.refresh()
    assert "TLS" in caught.value.hint
    assert isinstance(caught.value, Malformed) or "reached" in caught.value.message


@pytest.mark.parametrize(
    ("listener", "security", "option"),
    [
        ("SASL", Security(), "username= and password="),
        ("PLAIN", Security(tls=Tls()), "leave tls= out"),
        ("PLAIN", Security(sasl=Plain(username="alice", password="x")), "leave username="),
        ("SASL", Security(sasl=Plain(username="alice", password="x")), "check username="),
        ("TLS", Security(tls=Tls()), "ca_file="),
        ("TLS", Security(), "tls=True"),
    ],
)
def test_a_wrong_way_to_connect_is_told_with_the_option_to_change(
    broker: KafkaServer, listener: str, security: Security, option: str
) -> None:
    with (
        Client(broker.address(listener), clock=SystemClock(), security=security) as client,
        pytest.raises(EpochalError) as caught,
    ):
        client.refresh()
    assert option in caught.value.hint


def test_no_secret_shows_in_a_repr_and_settings_can_be_pickled() -> None:
    tls = Tls(certificate_file="c", key_password="key-secret")
    secrets: list[object] = [
        Security(tls=tls, sasl=Plain(username="u", password="pass-secret")),
        Scram(username="u", password="pass-secret"),
        OAuthBearer(token=lambda: "token-secret"),
    ]
    for held in secrets:
        assert "secret" not in repr(held)
    assert pickle.loads(pickle.dumps(secrets[0])) == secrets[0]


def conversation(mechanism: Mechanism, *answers: bytes) -> list[bytes]:
    exchange = mechanism.exchange()
    sent = [next(exchange)]
    for answer in answers:
        try:
            sent.append(exchange.send(answer))
        except StopIteration:
            break
    return sent


def scram(nonce: Callable[[], str] = lambda: "rOprNGfwEbeRWgbNEkqO", **more: str) -> Scram:
    options = {"username": "user", "password": "pencil", "mechanism": "SCRAM-SHA-256", **more}
    return Scram(**options, nonce=nonce)


SALT = "W22ZaJ0SNY7soEsUEjb6gQ=="
NONCE = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
FIRST = f"r={NONCE},s={SALT},i=4096".encode()
FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def test_scram_sends_the_messages_of_rfc_7677() -> None:
    sent = conversation(scram(), FIRST, FINAL)
    proof = "dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    assert sent == [
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        f"c=biws,r={NONCE},p={proof}".encode(),
    ]
    assert conversation(scram(username="a=b,c"))[0].startswith(b"n,,n=a=3Db=2Cc,")


@pytest.mark.parametrize(
    "answers",
    [
        (f"r=another,s={SALT},i=4096".encode(),),
        (f"r=rOprNGfwEbeRWgbNEkqO,s={SALT},i=4096".encode(),),
        (f"r={NONCE},s={SALT},i=1".encode(),),
        (f"r={NONCE},s={SALT},i=99999999".encode(),),
        (f"r={NONCE},s=&&&,i=4096".encode(),),
        (b"",),
        (FIRST, b"v=AAAA"),
        (FIRST, b"e=other-error"),
    ],
)
def test_a_broker_that_lies_in_scram_is_refused(answers: tuple[bytes, ...]) -> None:
    with pytest.raises(Misconfigured, match="SCRAM authentication failed"):
        conversation(scram(), *answers)


def test_an_unknown_scram_mechanism_is_refused() -> None:
    with pytest.raises(Misconfigured, match="SCRAM-SHA-1"):
        scram(mechanism="SCRAM-SHA-1")


def test_a_name_that_is_no_extension_is_refused() -> None:
    with pytest.raises(Misconfigured, match="extension"):
        OAuthBearer(token=str, extensions={"auth": "x"})


def test_a_token_function_that_ends_its_thread_is_tried_again() -> None:
    with pytest.raises(TryAgain, match="can't be had: SystemExit"):
        next(OAuthBearer(token=lambda: sys.exit("no network")).exchange())
