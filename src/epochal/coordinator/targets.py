"""
`Targets`: the sinks of a pipeline with their committers, as one driver holds them.

Several are asked at the same time; the calls of one committer never overlap. A committer that has
not answered in the time given still works on something, so from then on this driver calls none.

Sinks with the same `transaction_key` are one group: they are rehearsed and committed as one
transaction, in the order of their declaration. Any other sink is a group of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import (
    Begin,
    Committer,
    Confirming,
    Deadline,
    EngineAbility,
    EngineWrites,
    Identified,
    LimitsAttempts,
    SharedTransaction,
    SharesTransaction,
    Sink,
)
from epochal.coordinator.environment import Environment
from epochal.coordinator.rejected_rows import check_schemas, reject_sinks
from epochal.coordinator.retry import OnEnd, Result, StillRunning
from epochal.errors import Fenced, InvariantBroken, Misconfigured
from epochal.protocol.invariants import broken
from epochal.protocol.state import State
from epochal.terms import (
    UNCLAIMED,
    Ability,
    EpochNumber,
    Identity,
    Json,
    Limits,
    Mark,
    Receipt,
    Receipts,
    SinkName,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")


STOPPING = (Fenced, InvariantBroken)
"""What ends a driver wherever it is found, and must not be hidden by another target's error."""
_AFTER_HANG = (
    "its call may still take effect, so nothing more is asked of any target in this run: start "
    "again, the new start asks what became of it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call to a target, and the sinks that it is about."""

    sinks: tuple[SinkName, ...]
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"sink {', '.join(self.sinks)}"


class Targets:
    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        *,
        limits: Limits,
        environment: Environment,
        on_hang: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hang` is called when a target hangs and is not called any more."""
        self._sinks = sinks
        self._limits = limits
        self._parallel = environment.parallel
        self._on_hang = on_hang
        self._handouts: dict[SinkName, Json] = {}
        self.committers: dict[SinkName, Committer] = {}
        self.shared: dict[SinkName, SharedTransaction] = {}
        """The transaction of each sink that shares one with others, and of no other sink."""

    def open(self, state: State) -> None:
        """Make a committer for each sink, under this state's identity."""
        self.close()
        for name, sink in self._sinks.items():
            self.committers[name] = sink.committer(identity_of(state, name), self._limits)
        self.shared = shared_transactions(self._sinks, self.committers)

    def close(self) -> None:
        calls = [Call(sinks=(sink,), run=one.close) for sink, one in self.committers.items()]
        results = self.in_parallel(calls, give_up_s=self._limits.abort_timeout_s)
        for call, error in zip(calls, results, strict=True):
            if error is not None:
                logger.warning("%s could not be closed: %s", call, error)
        self.committers = {}

    def check(self, schemas: Mapping[SinkName, pa.Schema]) -> Sequence[Ability]:
        schemas = check_schemas(self._sinks, self.committers, schemas)
        found: dict[SinkName, Sequence[Ability]] = {}

        def check(sink: SinkName, committer: Committer) -> None:
            found[sink] = committer.check(schemas.get(sink))

        self.ask_each({sink: partial(check, sink, one) for sink, one in self.committers.items()})
        return [ability for sink in self.committers for ability in found[sink]]

    def engine_abilities(
        self, schemas: Mapping[SinkName, pa.Schema], engines: Mapping[SinkName, EngineAbility]
    ) -> Mapping[SinkName, Ability]:
        """
        Whether the engine's own writer prepares a sink's rows, where it ever could. Raises where
        only it can, and it can't be used.
        """
        return {
            sink: ability
            for sink, committer in self.committers.items()
            for ability in engine_ability(committer, schemas.get(sink), engines.get(sink))
        }

    def servers(self, before: State | None) -> Mapping[SinkName, Mapping[str, Json]]:
        """
        Of each server that says which one it is: `server`, and in `server_change` what is said of
        it that it is another than at the last start. That stays until an epoch is decided.
        """
        found: dict[SinkName, Mapping[str, Json]] = {}

        def ask(sink: SinkName, committer: Identified) -> None:
            known = {} if before is None else before.sinks.get(sink, {})
            server = known.get("server")
            is_known = known.get("target") == self._sinks[sink].describe().get("target")
            change = ""
            if isinstance(server, Mapping) and is_known:
                change = committer.server_change(server)
                if change:
                    logger.warning("sink %s: %s", sink, change)
            if not change and before is not None and not before.has_decided:
                change = str(known.get("server_change", ""))
            found[sink] = {"server": committer.server(), "server_change": change}

        self.ask_each(
            {
                sink: partial(ask, sink, one)
                for sink, one in self.committers.items()
                if isinstance(one, Identified)
            }
        )
        return {sink: _stated(one) for sink, one in found.items()}

    def newest(self) -> Mapping[SinkName, Sequence[Mark] | None]:
        """What each target proves of this pipeline's name."""
        marks: dict[SinkName, Sequence[Mark] | None] = {}

        def ask(sink: SinkName, committer: Committer) -> None:
            marks[sink] = committer.newest()

        self.ask_each({sink: partial(ask, sink, one) for sink, one in self.committers.items()})
        return {sink: marks[sink] for sink in self.committers}

    def have_leftovers(self) -> bool:
        """Whether attempts of earlier epochs take up room where there is little of it."""
        found: list[bool] = []

        def ask(committer: LimitsAttempts) -> None:
            found.append(committer.has_leftovers())

        asked = {
            sink: partial(ask, one)
            for sink, one in self.committers.items()
            if getattr(self._sinks[sink], "writers_max", None) is not None
            and isinstance(one, LimitsAttempts)
        }
        if asked:
            self.ask_each(asked)
        return any(found)

    def begin(self, begins: Mapping[SinkName, Begin]) -> None:
        """Ask for what the tasks of an epoch need."""
        handouts: dict[SinkName, Json] = {}

        def begin(sink: SinkName, one: Begin) -> None:
            handouts[sink] = self.committers[sink].begin(one)

        self.ask_each({sink: partial(begin, sink, one) for sink, one in begins.items()})
        self._handouts = handouts

    def handout(self, sink: SinkName) -> Json:
        return self._handouts.get(sink)

    # Groups: receipts of sinks that are rehearsed and committed by one call

    def groups(self, receipts: Receipts) -> list[Receipts]:
        """These receipts by transaction: sinks that share one are in one group."""
        groups: dict[object, dict[SinkName, Sequence[Receipt]]] = defaultdict(dict)
        for sink, some in receipts.items():
            shared = self.shared.get(sink)
            groups[sink if shared is None else id(shared)][sink] = some
        return list(groups.values())

    def rehearse_all(
        self, epoch: EpochNumber, groups: Sequence[Receipts]
    ) -> Mapping[tuple[SinkName, ...], Deadline]:
        """Rehearse these groups at the same time; returns until when their rows are kept."""
        deadlines: dict[tuple[SinkName, ...], Deadline] = {}

        def rehearse(group: Receipts) -> None:
            deadline = self._rehearse(epoch, group)
            if deadline is not None:
                deadlines[tuple(group)] = deadline

        self._at_once(
            [Call(sinks=tuple(group), run=partial(rehearse, group)) for group in groups],
            give_up_s=self._patience_s,
        )
        return deadlines

    def _rehearse(self, epoch: EpochNumber, group: Receipts) -> Deadline | None:
        sink = next(iter(group))
        if sink in self.shared:
            return self.shared[sink].rehearse(epoch, group)
        return self.committers[sink].rehearse(epoch, group[sink])

    def confirm_all(self, epoch: EpochNumber, groups: Sequence[Receipts]) -> None:
        """Ask those that hold a rehearsal open whether they still do."""
        self._at_once(
            [
                Call(sinks=tuple(group), run=confirm)
                for group in groups
                if (confirm := self._confirm(epoch, group)) is not None
            ],
            give_up_s=self._patience_s,
        )

    def _confirm(self, epoch: EpochNumber, group: Receipts) -> Callable[[], None] | None:
        sink = next(iter(group))
        shared = self.shared.get(sink)
        if isinstance(shared, Confirming):
            return partial(shared.confirm, epoch, group)
        committer = self.committers[sink]
        if shared is None and isinstance(committer, Confirming):
            return partial(committer.confirm, epoch, group[sink])
        return None

    def commit(self, epoch: EpochNumber, group: Receipts) -> None:
        sink = next(iter(group))
        if sink in self.shared:
            self.shared[sink].commit(epoch, group)
        else:
            self.committers[sink].commit(epoch, group[sink])

    # Several at the same time

    @property
    def _patience_s(self) -> float:
        """How long an answer of a slow but living target may take."""
        return max(self._limits.commit_retry_max_s, self._limits.commit_timeout_s)

    def ask_each(
        self, asked: Mapping[SinkName, Callable[[], None]], *, give_up_s: float | None = None
    ) -> None:
        """Ask each of these sinks by itself."""
        self._at_once(
            [Call(sinks=(sink,), run=run) for sink, run in asked.items()],
            give_up_s=self._patience_s if give_up_s is None else give_up_s,
        )

    def _at_once(self, calls: Sequence[Call], *, give_up_s: float) -> None:
        """
        Ask several sinks at the same time; an error is raised once all have answered.

        Not before: until then a target still works on the call, and must not get another. So each
        error is logged as it arrives, while another target may hang until the common deadline.
        `Fenced` and broken invariants are raised before others.
        """
        results = self.in_parallel(calls, give_up_s=give_up_s)
        errors = [result for result in results if result is not None]
        for error in sorted(errors, key=lambda one: not isinstance(one, STOPPING)):
            raise error

    def in_parallel(
        self,
        calls: Sequence[Call],
        *,
        give_up_s: float,
        on_end: OnEnd = lambda _at, _result: None,
        late_s: float | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> Sequence[Result]:
        """
        The same; returns the error of each, or None. All have one deadline. `on_late` is called
        after `late_s`, where some have not answered by then.
        """
        slow_s = self._limits.commit_timeout_s
        running = dict(enumerate(calls))

        def ended(at: int, result: Result) -> None:
            call = running.pop(at)
            if result is not None and running:
                logger.warning("%s: %s", call, result)
            on_end(at, _about(call, result))

        def late(after_s: float) -> None:
            if after_s == slow_s:
                unanswered = ", ".join(map(str, running.values()))
                logger.warning("%s: no answer after %.0f s", unanswered, slow_s)
            if after_s == late_s:
                on_late()

        try:
            results = self._parallel(
                [call.run for call in calls],
                late_s=sorted({slow_s, slow_s if late_s is None else late_s}),
                give_up_s=give_up_s,
                on_end=ended,
                on_late=late,
            )
        except BaseException:
            # Interrupted while it waited: the calls themselves go on.
            self._abandon()
            raise
        if any(isinstance(result, StillRunning) for result in results):
            self._abandon()
        return [_about(call, result) for call, result in zip(calls, results, strict=True)]

    def _abandon(self) -> None:
        self._on_hang()
        self.committers = {}
        self.shared = {}


def _about(call: Call, result: Result) -> Result:
    """`StillRunning` with the names of the sinks that did not answer; any other as it is."""
    if not isinstance(result, StillRunning):
        return result
    return StillRunning(f"{call}: {result.message}", _AFTER_HANG)


def engine_ability(
    committer: Committer, schema: pa.Schema | None, engine: EngineAbility | None
) -> Sequence[Ability]:
    """
    Whether the engine's own writer prepares these rows, and why; empty where no job of the engine
    writes them, and where rows of this kind of sink always go to tasks. `engine`: whether it could,
    by the engine itself. Raises `Misconfigured` where neither it nor tasks can.
    """
    if not isinstance(committer, EngineWrites):
        return []
    if engine is None:
        _require_tasks_can(committer, "no job of Spark writes the rows of this sink")
        return []
    return [engine_choice(committer, schema, engine)[1]]


def engine_choice(
    committer: EngineWrites, schema: pa.Schema | None, engine: EngineAbility
) -> tuple[str, Ability]:
    """
    The format in which the engine's own writer prepares these rows, and whether it does. Raises
    `Misconfigured` where neither it nor tasks can.
    """
    location = committer.engine_location
    offers = [(form, engine(form, location)) for form in committer.engine_formats]
    form, ability = next((offer for offer in offers if offer[1].granted), offers[-1])
    refusal = committer.engine_refusal(schema, form) if ability.granted else ability.because
    because = ability.because if refusal is None else refusal
    if form != offers[0][0]:
        because = f"{because}; {offers[0][1].because}"
    if refusal is not None:
        _require_tasks_can(committer, because)
    return form, replace(ability, granted=refusal is None, because=because)


def _require_tasks_can(committer: EngineWrites, engine_refusal: str) -> None:
    """Refuse rows that only the engine's own writer could prepare, where it can't be used."""
    if committer.tasks_refusal is not None:
        raise Misconfigured(
            f"{committer.tasks_refusal}, and it can't be used here: {engine_refusal}",
            "remove what stands against it, or leave out what only Spark's own writer does",
        )


def shared_transactions(
    sinks: Mapping[SinkName, Sink], committers: Mapping[SinkName, Committer]
) -> dict[SinkName, SharedTransaction]:
    """
    One transaction for all sinks of one `transaction_key`, where there are at least two.

    Sinks that are rehearsed later than the rest stay alone: those that prepare last, and those that
    get rejected rows.
    """
    late = reject_sinks(sinks)
    by_key: dict[str, list[SinkName]] = defaultdict(list)
    for name, sink in sinks.items():
        if sink.transaction_key is not None and name not in late and not sink.prepares_last:
            by_key[sink.transaction_key].append(name)
    shared: dict[SinkName, SharedTransaction] = {}
    for names in by_key.values():
        if len(names) > 1:
            transaction = _share([committers[name] for name in names], names)
            shared |= dict.fromkeys(names, transaction)
    return shared


def _share(members: Sequence[Committer], names: Sequence[SinkName]) -> SharedTransaction:
    first = members[0]
    if not isinstance(first, SharesTransaction):
        raise broken("I3", f"{', '.join(names)} have one transaction_key and can't share one")
    return first.share(members)


# The sinks of a pipeline by name


def by_name(sinks: Sequence[Sink]) -> dict[SinkName, Sink]:
    """All sinks of a pipeline: those declared, then those that get the rows these reject."""
    if not isinstance(sinks, Sequence):
        raise Misconfigured(f"sinks= is a {type(sinks).__name__}, not a list", "sinks=[…]")
    if not sinks:
        raise Misconfigured("a pipeline needs at least one sink", "give it sinks=[…]")
    for one in sinks:
        if isinstance(one, type):
            name = one.__name__
            raise Misconfigured(f"sinks= has the class {name}, not a sink", f"{name}(…)")
    every = [*sinks, *_named_by_rejects_to(sinks)]
    named = {sink.name: sink for sink in every}
    if len(named) != len(every):
        names = [sink.name for sink in every]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise Misconfigured(
            f"two sinks share the name {', '.join(twice)}: receipts and ledgers go by name",
            'give one of them a name of its own: name="…"',
        )
    return named


def _named_by_rejects_to(sinks: Sequence[Sink]) -> list[Sink]:
    """Each once, also where several sinks name the same one."""
    found: list[Sink] = []
    for sink in sinks:
        other = sink.rejects_to
        if other is None or other in found:
            continue
        if other.where is not None or other.select is not None:
            raise Misconfigured(
                f"sink {other.name!r} gets the rows that {sink.name!r} rejects, and has where= or "
                "select=, which are for the rows of the query",
                "leave them out: rejected rows have columns of their own",
            )
        if other.rejects_to is not None:
            raise Misconfigured(
                f"sink {other.name!r} gets the rows that {sink.name!r} rejects, and may itself "
                "send rows elsewhere",
                "leave its on_reject= out: a sink for rejected rows takes all of them, in text "
                "columns without constraints",
            )
        found.append(other)
    return found


def described(sinks: Sequence[Sink]) -> dict[SinkName, Mapping[str, Json]]:
    """All sinks of a pipeline, for the log."""
    return {name: sink.describe() for name, sink in by_name(sinks).items()}


def _stated(fields: Mapping[str, Json]) -> Mapping[str, Json]:
    return {name: value for name, value in fields.items() if value}


def identity_of(state: State, sink: SinkName) -> Identity:
    return Identity(
        pipeline=state.pipeline,
        uid=state.uid,
        sink=sink,
        generation=state.generation,
        claim=state.claims[0] if state.claims else UNCLAIMED,
        run=state.run,
        location=state.location,
        committed=state.newest_committed.get(sink),
    )
