"""`Client`: synchronous; finds the broker for a request, and retries while that may help.

It caches leaders and coordinators, forgets one when a broker answers that it has changed, and
waits with growing pauses between rounds. It never repeats a request that may have been carried out,
unless the request only reads or its caller declares it repeatable: without an answer, that is
`OutcomeUnknown`.

For use by one thread at a time: connections are cheap, and so are clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self

from epochal.clock import Clock
from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka import errors, versions
from epochal.kafka.cluster import (
    NO_NODE,
    Address,
    AnyBroker,
    Cluster,
    Controller,
    Coordinator,
    CoordinatorKind,
    Leader,
    Node,
    Target,
    Topic,
)
from epochal.kafka.codes import Code
from epochal.kafka.connection import DEFAULT_LIMITS, Answer, Limits, Pending
from epochal.kafka.handshake import Link, closed_hint, connect
from epochal.kafka.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from epochal.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from epochal.kafka.primitives import Malformed, Message, Request
from epochal.kafka.security import PLAINTEXT, Security

READS = frozenset((1, 2, 3, 9, 10, 15, 16, 18, 23, 32, 60, 61, 65, 66))
"""API keys of requests that change nothing: repeated whenever an answer is missing."""

_TIME_LEFT_MIN_S = 0.1
_UNKNOWN_TOPIC = frozenset((Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID))


def top_code(answer: Message) -> int:
    """The error code of an answer that has one code for all of it."""
    code: int = getattr(answer, "error_code", Code.NONE)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Generic[Answer]):
    """A request, its target, and whether it may be repeated."""

    request: Request[Answer]
    to: Target = field(default_factory=AnyBroker)
    is_repeatable: bool = False
    """Whether sending it twice has the effect of once. Reads always are."""
    code_of: Callable[[Any], int] = top_code
    """Reads the code that decides on a retry: of a partition, say."""
    version_max: int | None = None

    @property
    def is_read(self) -> bool:
        return self.request.API_KEY in READS

    def __str__(self) -> str:
        return f"{type(self.request).__name__} to {self.to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to retry, and the pauses in between."""

    total_s: float = 60.0
    pause_first_s: float = 0.02
    pause_max_s: float = 1.0
    unknown_topic_s: float = 3.0
    """How long some brokers may not know a topic that was just created."""


DEFAULT_PATIENCE = Patience()


class Client:
    """A client of one cluster."""

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        clock: Clock,
        security: Security = PLAINTEXT,
        client_id: str = "epochal",
        limits: Limits = DEFAULT_LIMITS,
        patience: Patience = DEFAULT_PATIENCE,
        lanes: int = 1,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`lanes`: connections per broker, which works on one request per connection at a time."""
        listed = bootstrap.split(",") if isinstance(bootstrap, str) else bootstrap
        self._bootstrap = [Address.parse(text) for text in listed if text.strip()]
        if not self._bootstrap:
            raise Misconfigured("no broker is named", hint="bootstrap='host:port,host:port'")
        self.cluster = Cluster()
        self.patience = patience
        self._clock = clock
        self._security = security
        self._context = None if security.tls is None else security.tls.context()
        self._client_id = client_id
        self._limits = limits
        self._lanes = max(lanes, 1)
        self._jitter = jitter
        self._links: dict[tuple[Address, int], Link] = {}
        self._coordinators: dict[Coordinator, int] = {}
        self._features: tuple[int, Mapping[str, int]] = (-1, {})
        self._round = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for link in self._links.values():
            link.connection.close()
        self._links.clear()

    # Asking

    def ask(
        self,
        request: Request[Answer],
        to: Target | None = None,
        *,
        is_repeatable: bool = False,
        code_of: Callable[[Any], int] = top_code,
        version_max: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """
        The answer to one request, whatever its error code; transient codes are retried first.

        Raises `TryAgain`, `OutcomeUnknown`, `Misconfigured` or `Malformed` after the last retry.
        """
        (answer,) = self.ask_all(
            [
                Ask(
                    request=request,
                    to=AnyBroker() if to is None else to,
                    is_repeatable=is_repeatable,
                    code_of=code_of,
                    version_max=version_max,
                )
            ],
            timeout_s=timeout_s,
        )
        if isinstance(answer, EpochalError):
            raise answer
        return answer

    def ask_all(
        self, asks: Sequence[Ask[Answer]], *, timeout_s: float | None = None
    ) -> list[Answer | EpochalError]:
        """Send many requests at once: all of a round are under way before any is awaited."""
        started = self._clock.monotonic()
        deadline = started + (self.patience.total_s if timeout_s is None else timeout_s)
        found: list[Answer | EpochalError | None] = [None] * len(asks)
        left = list(range(len(asks)))
        pause = self.patience.pause_first_s
        while left:
            left = self._ask_round(asks, left, found, (started, deadline))
            if not left:
                break
            now = self._clock.monotonic()
            if now + pause >= deadline:
                break
            self._clock.sleep(pause * (0.5 + self._jitter() / 2))
            pause = min(pause * 2, self.patience.pause_max_s)
        return [answer if answer is not None else _no_time_left() for answer in found]

    def _ask_round(
        self,
        asks: Sequence[Ask[Answer]],
        left: list[int],
        found: list[Answer | EpochalError | None],
        span: tuple[float, float],
    ) -> list[int]:
        """Send all that is left, then read the answers; returns what should be retried."""
        started, deadline = span
        time_left = max(deadline - self._clock.monotonic(), _TIME_LEFT_MIN_S)
        timeout_s = min(time_left, self._limits.request_timeout_s)
        under_way: list[tuple[int, Pending[Answer]]] = []
        again: list[int] = []
        for index in left:
            try:
                lane = index % self._lanes
                pending = self.submit(asks[index], lane=lane, timeout_s=timeout_s)
                under_way.append((index, pending))
            except EpochalError as error:
                found[index] = error
                if self._is_worth_another_try(asks[index], error, started):
                    again.append(index)
        for index, pending in under_way:
            ask = asks[index]
            try:
                answer = pending.result()
            except EpochalError as error:
                found[index] = error
                if self._is_worth_another_try(ask, error, started):
                    again.append(index)
                continue
            code = ask.code_of(answer)
            if not errors.is_transient(code) or self._is_still_unknown(code, started):
                found[index] = answer
                continue
            if code in errors.MOVED:
                self.forget(ask.to)
            found[index] = errors.error_for(code, str(ask), is_read=ask.is_read)
            again.append(index)
        return again

    def _is_still_unknown(self, code: int, started: float) -> bool:
        """Whether a topic is missing for longer than a topic that was just created."""
        waited_s = self._clock.monotonic() - started
        return code in _UNKNOWN_TOPIC and waited_s >= self.patience.unknown_topic_s

    def _is_worth_another_try(self, ask: Ask[Any], error: EpochalError, started: float) -> bool:
        if isinstance(error, UnknownTopic):
            return not self._is_still_unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, started)
        self.forget(ask.to)
        if isinstance(error, OutcomeUnknown):
            return ask.is_repeatable or ask.is_read
        return isinstance(error, TryAgain)

    def submit(
        self, ask: Ask[Answer], *, lane: int = 0, timeout_s: float | None = None
    ) -> Pending[Answer]:
        """Send a request once, without retries; the caller awaits its result."""
        try:
            link = self._link_for(ask.to, lane)
        except OutcomeUnknown as error:
            # A look-up was not answered: the request itself was not sent.
            raise TryAgain(error.message, error.hint) from error
        return link.send(
            ask.request,
            transaction_version=self._transaction_version_seen(),
            timeout_s=timeout_s,
            version_max=ask.version_max,
        )

    # Leaders and coordinators

    def topic(self, name: str) -> Topic:
        """A topic with its leaders, looked up if it is not known yet."""
        if name not in self.cluster.topics:
            self.refresh([name])
        return self.cluster.topics[name]

    def await_topic(self, name: str, partitions: int = 1) -> Topic:
        """
        The same, with time for a topic that was just created, or got more partitions, to become
        known to the broker that is asked.
        """
        started = self._clock.monotonic()
        while True:
            is_late = self._is_still_unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, started)
            try:
                found = self.topic(name)
            except UnknownTopic:
                if is_late:
                    raise
            except OutcomeUnknown as error:
                raise TryAgain(error.message, error.hint) from error
            else:
                if found.partition_count >= partitions or is_late:
                    return found
                self.forget(Leader(name, 0))
            self._clock.sleep(self.patience.pause_first_s)

    def nodes(self) -> Sequence[Node]:
        """All brokers, looked up now."""
        self.refresh([])
        return [Node(node_id) for node_id in sorted(self.cluster.addresses)]

    def ask_every_broker(self, request: Request[Answer], about: str) -> list[Answer]:
        """
        The answers of all brokers, where each answers for its own part only. One that is missing or
        refused raises: the rest would pass for the whole.
        """
        asks: list[Ask[Answer]] = [Ask(request=request, to=node) for node in self.nodes()]
        answers: list[Answer] = []
        for answer in self.ask_all(asks):
            if isinstance(answer, EpochalError):
                raise answer
            errors.require_ok(top_code(answer), about)
            answers.append(answer)
        return answers

    def refresh(self, topics: Iterable[str] = ()) -> None:
        """Look up the cluster and these topics, at any broker. Never creates one."""
        asked = [MetadataRequestTopic(name=name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=False)
        answer = self._ask_any_broker(lambda link: link.send(request, transaction_version=0))
        self.cluster = self.cluster.updated(answer)
        for topic in answer.topics:
            if topic.error_code in _UNKNOWN_TOPIC:
                self.cluster = self.cluster.without(topic.name or "")
                raise UnknownTopic(
                    f"there is no topic {topic.name!r}", hint="create it, or correct its name"
                )
            if topic.error_code != Code.NONE and not errors.is_transient(topic.error_code):
                self.cluster = self.cluster.without(topic.name or "")
                errors.require_ok(topic.error_code, f"looking up the topic {topic.name!r}")

    def coordinator(self, of: Coordinator) -> int:
        """The id of the broker that coordinates a transactional id or a group."""
        if of in self._coordinators:
            return self._coordinators[of]
        request = FindCoordinatorRequest(key=of.key, key_type=of.kind, coordinator_keys=[of.key])

        def send(link: Link) -> Pending[FindCoordinatorResponse]:
            version = versions.choose(request, link.versions, transaction_version=0)
            request.coordinator_keys = [] if version < 4 else [of.key]
            request.key = of.key if version < 4 else ""
            return link.connection.send(request, version)

        answer = self._ask_any_broker(send)
        found = answer.coordinators[0] if answer.coordinators else answer
        if found.error_code:
            about = f"looking for {of}"
            if found.error_code in errors.DENIED:
                about += ", which needs the right Describe on it"
            raise errors.error_for(found.error_code, about, found.error_message, is_read=True)
        self._coordinators[of] = found.node_id
        self._add_address(found.node_id, Address(found.host, found.port))
        return found.node_id

    def locate(self, ofs: Sequence[Coordinator]) -> None:
        """Look up many coordinators in one request; those not found are looked up when used."""
        with suppress(TryAgain):
            self._locate(ofs)

    def _locate(self, ofs: Sequence[Coordinator]) -> None:
        missing = list(dict.fromkeys(of for of in ofs if of not in self._coordinators))
        for kind in CoordinatorKind:
            keys = [of.key for of in missing if of.kind is kind]
            if len(keys) < 2:
                continue
            request = FindCoordinatorRequest(key_type=kind, coordinator_keys=keys)
            if self.supported_versions(request.API_KEY)[1] < 4:
                continue
            answer = self._ask_any_broker(lambda link: link.send(request, transaction_version=0))  # noqa: B023  asked at once
            for found in answer.coordinators:
                if found.error_code == Code.NONE:
                    self._coordinators[Coordinator(found.key, kind)] = found.node_id
                    self._add_address(found.node_id, Address(found.host, found.port))

    def _ask_any_broker(self, send: Callable[[Link], Pending[Answer]]) -> Answer:
        """A look-up: once more on a new connection where the old one turns out to be dead."""
        try:
            return send(self._any_link(0)).result()
        except (OutcomeUnknown, TryAgain):
            pass
        try:
            return send(self._any_link(0)).result()
        except OutcomeUnknown as error:
            # The versions are answered to everybody, so that this may be the first refusal.
            hint = error.hint or closed_hint(self._security)
            raise TryAgain(error.message, hint) from error

    def _add_address(self, node_id: int, address: Address) -> None:
        if self.cluster.addresses.get(node_id) != address:
            known = {**self.cluster.addresses, node_id: address}
            self.cluster = Cluster(
                cluster_id=self.cluster.cluster_id,
                controller_id=self.cluster.controller_id,
                addresses=known,
                topics=self.cluster.topics,
            )

    def forget(self, target: Target) -> None:
        """Drop the cached broker of a target; it is looked up when next needed."""
        match target:
            case Coordinator():
                self._coordinators.pop(target, None)
            case Leader():
                self.cluster = self.cluster.without(target.topic)
            case Controller():
                self.cluster = Cluster(addresses=self.cluster.addresses, topics=self.cluster.topics)

    # Features

    def features(self) -> Mapping[str, int]:
        """The features that the cluster has switched on, by the newest answer of any broker."""
        self._any_link(0)
        return self._features[1]

    def supported_versions(self, api_key: int) -> tuple[int, int]:
        """The versions of an API that a broker supports; (-1, -1) where it does not know it."""
        return self._any_link(0).versions.get(api_key, (-1, -1))

    def supports(self, api_key: int) -> bool:
        return self.supported_versions(api_key)[1] >= 0

    def transaction_version(self) -> int:
        """2 and above: the newer transaction protocol is switched on."""
        return self.features().get(versions.TRANSACTION_FEATURE, 0)

    def _transaction_version_seen(self) -> int:
        return self._features[1].get(versions.TRANSACTION_FEATURE, 0)

    # Links

    def _link_for(self, target: Target, lane: int) -> Link:
        match target:
            case AnyBroker():
                return self._any_link(lane)
            case Node():
                return self._to_node(target.node_id, lane)
            case Controller():
                if self.cluster.controller_id == NO_NODE:
                    self.refresh()
                return self._to_node(self.cluster.controller_id, lane)
            case Coordinator():
                return self._to_node(self.coordinator(target), lane)
            case Leader():
                leaders = self.topic(target.topic).leaders
                if target.partition not in leaders:
                    self.forget(target)
                    raise UnknownTopic(f"{target.topic!r} has no partition {target.partition}")
                return self._to_node(leaders[target.partition], lane)

    def _to_node(self, node_id: int, lane: int) -> Link:
        if node_id not in self.cluster.addresses:
            self.refresh()
        address = self.cluster.addresses.get(node_id)
        if address is None:
            missing = f"broker {node_id} is not there" if node_id >= 0 else "there is no leader"
            raise TryAgain(f"{missing} now")
        return self._link(address, lane)

    def _any_link(self, lane: int) -> Link:
        """A link that is open already, or else the first address that answers."""
        for link in self._links.values():
            if link.connection.is_open and self._clock.monotonic() < link.expires_at:
                return link
        known = [*self.cluster.addresses.values(), *self._bootstrap]
        addresses = list(dict.fromkeys(known))
        self._round += 1
        start = self._round % len(addresses)
        failures: list[EpochalError] = []
        for address in addresses[start:] + addresses[:start]:
            try:
                return self._link(address, lane)
            except (TryAgain, Misconfigured, Malformed) as error:
                failures.append(error)
        raise _unreachable(failures)

    def _link(self, address: Address, lane: int) -> Link:
        place = (address, lane)
        link = self._links.get(place)
        if link is not None and link.connection.is_open:
            if self._clock.monotonic() < link.expires_at:
                return link
            # Requests under way are answered first: a session is replaced some time before its end.
            link.connection.drain()
            link.connection.close()
        link = connect(
            address,
            security=self._security,
            context=self._context,
            client_id=self._client_id,
            clock=self._clock,
            limits=self._limits,
        )
        self._links[place] = link
        if link.features_epoch >= self._features[0]:
            self._features = (link.features_epoch, link.features)
        return link


class UnknownTopic(Misconfigured):
    """A topic or partition that does not exist, or that the broker does not know yet."""


def _no_time_left() -> EpochalError:
    return TryAgain("there was no time left to ask")


_ADDRESSES = "check the addresses of the brokers, and that they are up"


def _unreachable(failures: Sequence[EpochalError]) -> EpochalError:
    """The error where no address answered; `TryAgain` if any of them may answer later."""
    reasons = "; ".join(dict.fromkeys(error.message for error in failures))
    hint = next((error.hint for error in failures if error.hint), _ADDRESSES)
    if any(isinstance(error, TryAgain) for error in failures):
        return TryAgain(f"no broker can be reached: {reasons}", hint)
    return type(failures[0])(reasons, hint)


def group_coordinator(group_id: str) -> Coordinator:
    return Coordinator(group_id, CoordinatorKind.GROUP)
