"""A synchronous client: finds the broker in charge, asks it, and asks again while that may help.

It knows who leads a partition or coordinates an id, forgets that when a broker disowns it, and
waits with growing pauses between rounds. What it never does is to repeat a request that may have
been carried out: unless the request only reads, or its caller says that a repetition is harmless,
an answer that does not come is `OutcomeUnknown`.

For use by one thread at a time: connections are cheap, and so are clients.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self

from epochal.contract import Clock
from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.kafka import faults, versions
from epochal.kafka.cluster import (
    NO_NODE,
    Address,
    Anyone,
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
from epochal.kafka.handshake import Link, connect
from epochal.kafka.messages.find_coordinator import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from epochal.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from epochal.kafka.primitives import Malformed, Message, Request
from epochal.kafka.security import PLAINTEXT, Security

READS = frozenset((1, 2, 3, 9, 10, 15, 16, 18, 23, 32, 60, 61, 65, 66))
"""API keys of requests that change nothing: asked again whenever an answer is missing."""

_TIME_LEFT_MIN_S = 0.1
_UNKNOWN_TOPIC = frozenset((Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID))


def top_code(answer: Message) -> int:
    """The error code of an answer that has one for all of it."""
    code: int = getattr(answer, "error_code", Code.NONE)
    return code


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Generic[Answer]):
    """A request, whom it is for, and what may be done when its answer is not plain."""

    request: Request[Answer]
    to: Target = field(default_factory=Anyone)
    is_repeatable: bool = False
    """Whether doing it twice is the same as once. Reads always are."""
    code_of: Callable[[Any], int] = top_code
    """Picks the code that decides whether to ask again: of a partition, say."""
    version_max: int | None = None

    @property
    def is_read(self) -> bool:
        return self.request.API_KEY in READS

    def __str__(self) -> str:
        return f"{type(self.request).__name__} to {self.to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to go on asking, and how to pause in between."""

    total_s: float = 60.0
    pause_first_s: float = 0.02
    pause_max_s: float = 1.0
    unknown_topic_s: float = 3.0
    """A topic that was just created is unknown to some brokers for a moment; not for longer."""


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
        """`lanes`: connections to a broker, which works on one request of each at a time."""
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
        The answer to one request, whatever its error code, unless that code asks for another try.

        Such codes end in an error only when patience does. Raises `TryAgain`, `OutcomeUnknown`,
        `Misconfigured` or `Malformed`.
        """
        (answer,) = self.ask_all(
            [
                Ask(
                    request=request,
                    to=Anyone() if to is None else to,
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
        """Ask many things at once: all requests of a round are under way before any is awaited."""
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
        return [answer if answer is not None else _nothing_said() for answer in found]

    def _ask_round(
        self,
        asks: Sequence[Ask[Answer]],
        left: list[int],
        found: list[Answer | EpochalError | None],
        span: tuple[float, float],
    ) -> list[int]:
        """Send what is left, then gather; what may be asked again is returned."""
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
            if not faults.is_passing(code) or self._is_still_unknown(code, started):
                found[index] = answer
                continue
            if code in faults.MOVED:
                self.forget(ask.to)
            found[index] = faults.error_for(code, str(ask), is_read=ask.is_read)
            again.append(index)
        return again

    def _is_still_unknown(self, code: int, started: float) -> bool:
        """Whether a topic is missing for longer than one that was just created would be."""
        waited_s = self._clock.monotonic() - started
        return code in _UNKNOWN_TOPIC and waited_s >= self.patience.unknown_topic_s

    def _is_worth_another_try(self, ask: Ask[Any], error: EpochalError, started: float) -> bool:
        if isinstance(error, _UnknownTopic):
            return not self._is_still_unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, started)
        self.forget(ask.to)
        if isinstance(error, OutcomeUnknown):
            return ask.is_repeatable or ask.is_read
        return isinstance(error, TryAgain)

    def submit(
        self, ask: Ask[Answer], *, lane: int = 0, timeout_s: float | None = None
    ) -> Pending[Answer]:
        """Send a request once and go on; nothing is asked again. Its result is the caller's."""
        try:
            link = self._link_for(ask.to, lane)
        except OutcomeUnknown as error:
            # It is a look-up that went unanswered: the request itself was not sent.
            raise TryAgain(error.message, error.hint) from error
        return link.send(
            ask.request,
            transaction_version=self._transaction_version_seen(),
            timeout_s=timeout_s,
            version_max=ask.version_max,
        )

    # Who is in charge

    def topic(self, name: str) -> Topic:
        """A topic with its leaders, asked for if it is not known yet."""
        if name not in self.cluster.topics:
            self.refresh([name])
        return self.cluster.topics[name]

    def await_topic(self, name: str) -> Topic:
        """The same; one that was just created is unknown to some brokers for a moment."""
        started = self._clock.monotonic()
        while True:
            try:
                return self.topic(name)
            except _UnknownTopic:
                if self._is_still_unknown(Code.UNKNOWN_TOPIC_OR_PARTITION, started):
                    raise
            except OutcomeUnknown as error:
                raise TryAgain(error.message, error.hint) from error
            self._clock.sleep(self.patience.pause_first_s)

    def nodes(self) -> Sequence[Node]:
        """All brokers, freshly asked for."""
        self.refresh([])
        return [Node(node_id) for node_id in sorted(self.cluster.addresses)]

    def refresh(self, topics: Iterable[str] = ()) -> None:
        """Ask any broker about the cluster and these topics. Never creates one."""
        asked = [MetadataRequestTopic(name=name) for name in topics]
        request = MetadataRequest(topics=asked, allow_auto_topic_creation=False)
        answer = self._asked_of_anyone(lambda link: link.send(request, transaction_version=0))
        self.cluster = self.cluster.updated(answer)
        for told in answer.topics:
            if told.error_code in _UNKNOWN_TOPIC:
                self.cluster = self.cluster.without(told.name or "")
                raise _UnknownTopic(
                    f"there is no topic {told.name!r}", hint="create it, or correct its name"
                )
            if told.error_code != Code.NONE and not faults.is_passing(told.error_code):
                self.cluster = self.cluster.without(told.name or "")
                faults.check(told.error_code, f"asking about the topic {told.name!r}")

    def coordinator(self, of: Coordinator) -> int:
        """The id of the broker that looks after a transactional id or a group."""
        if of in self._coordinators:
            return self._coordinators[of]
        request = FindCoordinatorRequest(key=of.key, key_type=of.kind, coordinator_keys=[of.key])

        def asked(link: Link) -> Pending[FindCoordinatorResponse]:
            version = versions.choose(request, link.spoken, transaction_version=0)
            request.coordinator_keys = [] if version < 4 else [of.key]
            request.key = of.key if version < 4 else ""
            return link.connection.send(request, version)

        answer = self._asked_of_anyone(asked)
        told = answer.coordinators[0] if answer.coordinators else answer
        if told.error_code:
            about = f"looking for {of}"
            if told.error_code in faults.DENIED:
                about += ", which takes the right Describe on it"
            raise faults.error_for(told.error_code, about, told.error_message, is_read=True)
        self._coordinators[of] = told.node_id
        self._know(told.node_id, Address(told.host, told.port))
        return told.node_id

    def locate(self, ofs: Sequence[Coordinator]) -> None:
        """Look many coordinators up in one request; what can't be found is looked up when used."""
        with suppress(TryAgain):
            self._locate(ofs)

    def _locate(self, ofs: Sequence[Coordinator]) -> None:
        missing = list(dict.fromkeys(of for of in ofs if of not in self._coordinators))
        for kind in CoordinatorKind:
            keys = [of.key for of in missing if of.kind is kind]
            if len(keys) < 2:
                continue
            request = FindCoordinatorRequest(key_type=kind, coordinator_keys=keys)
            if self.spoken(request.API_KEY)[1] < 4:
                continue
            answer = self._asked_of_anyone(lambda link: link.send(request, transaction_version=0))  # noqa: B023  asked at once
            for told in answer.coordinators:
                if told.error_code == Code.NONE:
                    self._coordinators[Coordinator(told.key, kind)] = told.node_id
                    self._know(told.node_id, Address(told.host, told.port))

    def _asked_of_anyone(self, ask: Callable[[Link], Pending[Answer]]) -> Answer:
        """A look-up: a connection that turns out to be dead is replaced, and it is asked again."""
        try:
            return ask(self._anyone(0)).result()
        except (OutcomeUnknown, TryAgain):
            pass
        try:
            return ask(self._anyone(0)).result()
        except OutcomeUnknown as error:
            raise TryAgain(error.message, error.hint) from error

    def _know(self, node_id: int, address: Address) -> None:
        if self.cluster.addresses.get(node_id) != address:
            known = {**self.cluster.addresses, node_id: address}
            self.cluster = Cluster(
                cluster_id=self.cluster.cluster_id,
                controller_id=self.cluster.controller_id,
                addresses=known,
                topics=self.cluster.topics,
            )

    def forget(self, target: Target) -> None:
        """Drop what is known about who a target is; it is looked up when next needed."""
        match target:
            case Coordinator():
                self._coordinators.pop(target, None)
            case Leader():
                self.cluster = self.cluster.without(target.topic)
            case Controller():
                self.cluster = Cluster(addresses=self.cluster.addresses, topics=self.cluster.topics)

    # Features

    def features(self) -> Mapping[str, int]:
        """The features that the cluster has switched on, by the newest word of any broker."""
        self._anyone(0)
        return self._features[1]

    def spoken(self, api_key: int) -> tuple[int, int]:
        """The versions of an API that a broker has; (-1, -1) where it has none."""
        return self._anyone(0).spoken.get(api_key, (-1, -1))

    def speaks(self, api_key: int) -> bool:
        return self.spoken(api_key)[1] >= 0

    def transaction_version(self) -> int:
        """2 and above: the newer transaction protocol is switched on."""
        return self.features().get(versions.TRANSACTION_FEATURE, 0)

    def _transaction_version_seen(self) -> int:
        return self._features[1].get(versions.TRANSACTION_FEATURE, 0)

    # Links

    def _link_for(self, target: Target, lane: int) -> Link:
        match target:
            case Anyone():
                return self._anyone(lane)
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
                    raise _UnknownTopic(f"{target.topic!r} has no partition {target.partition}")
                return self._to_node(leaders[target.partition], lane)

    def _to_node(self, node_id: int, lane: int) -> Link:
        if node_id not in self.cluster.addresses:
            self.refresh()
        address = self.cluster.addresses.get(node_id)
        if address is None:
            gone = f"broker {node_id} is not there" if node_id >= 0 else "nobody is in charge"
            raise TryAgain(f"{gone} now")
        return self._link(address, lane)

    def _anyone(self, lane: int) -> Link:
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
        raise _nobody_there(failures)

    def _link(self, address: Address, lane: int) -> Link:
        place = (address, lane)
        link = self._links.get(place)
        if link is not None and link.connection.is_open:
            if self._clock.monotonic() < link.expires_at:
                return link
            # What is under way on it is answered first: a session ends with a margin.
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


class _UnknownTopic(Misconfigured):
    """Named, and not there; perhaps not there yet."""


def _nothing_said() -> EpochalError:
    return TryAgain("there was no time left to ask")


def _nobody_there(failures: Sequence[EpochalError]) -> EpochalError:
    """What to raise when no address answered: if any may answer later, that one decides."""
    told = "; ".join(dict.fromkeys(error.message for error in failures))
    hint = next((error.hint for error in failures if error.hint), "")
    if any(isinstance(error, TryAgain) for error in failures):
        return TryAgain(f"no broker can be reached: {told}", hint)
    return type(failures[0])(told, hint)


def group_coordinator(group_id: str) -> Coordinator:
    return Coordinator(group_id, CoordinatorKind.GROUP)
