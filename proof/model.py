"""
Every interleaving, at small size: `python -m proof.model`.

Drivers run as they are shipped (see `behaviour`), and share one world. A state is the world,
where each driver stands in its history, and which calls are still on their way. From each state
every step is taken: any driver gets its answer; within a budget of faults, the call it waits for
fails, loses its answer, is on its way for as long as it likes, or its driver dies there; what is
on its way lands; a target throws prepared rows away. A driver that is not chosen sleeps, while
others claim, decide and delete records below it. States that were met before are not walked
again.

The judge checks I1 to I10 at every step. Where all drivers have ended and nothing is on its way,
a last driver starts and stops undisturbed, and the judge checks what is at rest.

Bounds are part of the claim, and are printed with it: each scenario names its drivers, sinks,
tasks, epochs and faults. A crash is tried before every call that changes something: a crash
elsewhere leaves the same world. States are distinguished by a 64-bit hash of their content.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from epochal.errors import EpochalError, OutcomeUnknown, TryAgain, Unsettled
from epochal.terms import EpochNumber, SinkName
from epochal.testing.crash import Breach
from epochal.testing.driver import Driver, Partitions, ends_by_the_rules
from proof.behaviour import ROOT, Answer, Behaviour, Failure, Reply, settled_environment
from proof.calls import SPARK, Call, Send, SimLog, SimSink, SimSpark
from proof.judge import OTHER
from proof.scenarios import SCENARIOS, Scenario
from proof.world import Source, World

DEAD = -1
_PROGRESS_EVERY_S = 5.0
_LAST_CALLS_MAX = 2000

_UNSEEN = frozenset({"offsets", "rehearse", "twice"})
"""No other actor can observe when these are called, so one order of them is enough."""

UNANSWERED = Failure(OutcomeUnknown)
NOT_DONE = Failure(TryAgain)


@dataclass(slots=True, eq=False)
class State:
    world: World
    nodes: tuple[int, ...]
    flying: tuple[Call, ...]
    faults: int
    expiries: int
    trace: Trace | None

    def key(self) -> int:
        return hash(
            (self.world.key(), self.nodes, frozenset(self.flying), self.faults, self.expiries)
        )


@dataclass(frozen=True, slots=True)
class Trace:
    """How a state was reached: shared, so that a million states don't hold a million lists."""

    what: str
    call: Call | None
    before: Trace | None

    def lines(self) -> list[str]:
        steps: list[str] = []
        at: Trace | None = self
        while at is not None:
            steps.append(f"{at.what} {at.call or ''}".strip())
            at = at.before
        return steps[::-1]


@dataclass(slots=True, kw_only=True)
class Walk:
    """What walking a scenario came to."""

    scenario: Scenario
    states: int = 0
    transitions: int = 0
    ends: int = 0
    histories: int = 0
    seconds: float = 0.0
    breach: Breach | None = None
    trace: list[str] = field(default_factory=list)
    is_complete: bool = True

    def __str__(self) -> str:
        verdict = "no breach" if self.breach is None else str(self.breach)
        whole = "" if self.is_complete else ", NOT COMPLETE"
        return (
            f"{self.scenario.name}: {self.states} states, {self.transitions} transitions, "
            f"{self.ends} ends, {self.histories} driver histories, {self.seconds:.1f} s{whole}: "
            f"{verdict} [{self.scenario.bounds}]"
        )


class Explorer:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._source = Source.of(*scenario.sizes)
        self._sinks = tuple(SinkName(name) for name in scenario.sinks)
        self._behaviours = [Behaviour(self._builder(name)) for name in scenario.drivers]
        self._last = Behaviour(self._builder("Z"))
        self._seen: set[int] = set()
        self._rested: set[int] = set()
        self.walk = Walk(scenario=scenario)

    def explore(self, *, states_max: int | None = None, seconds_max: float | None = None) -> Walk:
        """Walk everything, depth first, or until a breach or a bound."""
        began_s = reported_s = time.monotonic()
        first = State(
            world=World(self._source, self._sinks),
            nodes=tuple(ROOT for _ in self._behaviours),
            flying=(),
            faults=self._scenario.faults,
            expiries=self._scenario.expiries,
            trace=None,
        )
        stack = [first]
        self._seen.add(first.key())
        walk = self.walk
        while stack:
            state = stack.pop()
            walk.states += 1
            try:
                self._expand(state, stack)
            except Breach as breach:
                walk.breach = breach
                walk.trace = state.trace.lines() if state.trace else []
                walk.trace.append(f"→ {breach}")
                break
            now_s = time.monotonic()
            if now_s - reported_s > _PROGRESS_EVERY_S:
                reported_s = now_s
                _say(f"  {self._scenario.name}: {walk.states} states, {len(stack)} waiting")
            if (states_max is not None and walk.states >= states_max) or (
                seconds_max is not None and now_s - began_s > seconds_max
            ):
                walk.is_complete = not stack
                break
        walk.histories = sum(len(behaviour) for behaviour in self._behaviours)
        walk.seconds = time.monotonic() - began_s
        return walk

    # Steps

    def _expand(self, state: State, stack: list[State]) -> None:
        for after in self._steps(state):
            self.walk.transitions += 1
            key = after.key()
            if key not in self._seen:
                self._seen.add(key)
                stack.append(after)

    def _steps(self, state: State) -> Iterator[State]:
        waiting = [(at, self._call(at, node)) for at, node in enumerate(state.nodes)]
        calls = [(at, call) for at, call in waiting if call is not None]
        for at, call in calls:
            if call.verb in _UNSEEN:
                yield from self._unseen(state, at, call)
                return
        for at, call in calls:
            yield self._answered(state, at, call)
            if state.faults:
                yield from self._disturbed(state, at, call)
        for call in sorted(set(state.flying), key=str):
            yield self._landed(state, call)
        if state.expiries and calls:
            yield from self._expired(state)
        if not calls and not state.flying:
            self._rest(state)

    def _call(self, at: int, node: int) -> Call | None:
        return None if node == DEAD else self._behaviours[at].call(node)

    def _unseen(self, state: State, at: int, call: Call) -> Iterator[State]:
        if call.verb != "twice" or not self._scenario.speculates:
            yield self._answered(state, at, call)
            if state.faults:
                yield from self._disturbed(state, at, call)
            return
        for answer in (False, True):
            step = Trace("twice" if answer else "once", call, state.trace)
            yield self._goes_on(state, at, Answer(answer), state.world, step)

    def _answered(self, state: State, at: int, call: Call) -> State:
        step = Trace("", call, state.trace)
        world, reply = self._effect(state, call, step)
        return self._goes_on(state, at, reply, world, step)

    def _disturbed(self, state: State, at: int, call: Call) -> Iterator[State]:
        kinds = self._scenario.kinds
        if not call.changes_something:
            if self._scenario.reads_fail and call.room != SPARK:
                yield self._fault(state, at, NOT_DONE, None, Trace("fails:", call, state.trace))
            return
        if "crash" in kinds:
            yield self._fault(state, at, None, None, Trace("dies before", call, state.trace))
        if call.room == SPARK:
            return
        if "fail" in kinds:
            yield self._fault(state, at, NOT_DONE, None, Trace("fails:", call, state.trace))
        if "lost" in kinds:
            yield self._unanswered(state, at, call)
        if "half" in kinds and call.verb == "commit":
            half = Call(call.actor, call.room, call.name, "commit_half", call.args, call.identity)
            yield self._unanswered(state, at, half)
        if "late" in kinds:
            step = Trace("on its way:", call, state.trace)
            late = self._fault(state, at, UNANSWERED, None, step)
            late.flying = tuple(sorted((*state.flying, call), key=str))
            yield late

    def _unanswered(self, state: State, at: int, call: Call) -> State:
        step = Trace("answer lost:", call, state.trace)
        world, _ = self._effect(state, call, step)
        return self._fault(state, at, UNANSWERED, world, step)

    def _landed(self, state: State, call: Call) -> State:
        world, step = state.world.copy(), Trace("lands late:", call, state.trace)
        with _found_at(state, step):
            world.land_late(call)
        flying = list(state.flying)
        flying.remove(call)
        return State(world, state.nodes, tuple(flying), state.faults, state.expiries, step)

    def _expired(self, state: State) -> Iterator[State]:
        for sink in self._sinks:
            for some in _choices(sorted(state.world.targets[sink].prepared)):
                world = state.world.copy()
                world.expire(sink, some)
                step = Trace(f"{sink} throws away {', '.join(some)}", None, state.trace)
                yield State(
                    world, state.nodes, state.flying, state.faults, state.expiries - 1, step
                )

    def _effect(self, state: State, call: Call, step: Trace) -> tuple[World, Reply]:
        world = state.world.copy()
        with _found_at(state, step):
            world.issue(call)
            try:
                return world, Answer(world.land(call))
            except EpochalError as error:
                return world, Failure.of(error)

    def _fault(
        self, state: State, at: int, reply: Reply | None, world: World | None, step: Trace
    ) -> State:
        after = self._goes_on(state, at, reply, world or state.world, step)
        after.faults = state.faults - 1
        return after

    def _goes_on(
        self, state: State, at: int, reply: Reply | None, world: World, step: Trace
    ) -> State:
        """Driver `at` gets its reply; without one it is dead."""
        node = DEAD if reply is None else self._behaviours[at].after(state.nodes[at], reply)
        error = None if node == DEAD else self._behaviours[at].end(node)
        if error is not None and not ends_by_the_rules(error):
            with _found_at(state, step):
                raise Breach("defect", f"a driver ended with {error!r}")
        nodes = (*state.nodes[:at], node, *state.nodes[at + 1 :])
        return State(world, nodes, state.flying, state.faults, state.expiries, step)

    # The end

    def _rest(self, state: State) -> None:
        key = hash(state.world.key())
        if key in self._rested:
            return
        self._rested.add(key)
        self.walk.ends += 1
        world, node = state.world.copy(), ROOT
        for _ in range(_LAST_CALLS_MAX):
            call = self._last.call(node)
            if call is None:
                break
            state.trace = Trace("", call, state.trace)
            world.issue(call)
            try:
                reply: Reply = Answer(world.land(call))
            except EpochalError as error:
                reply = Failure.of(error)
            node = self._last.after(node, reply)
        self._judge_rest(world, self._last.end(node))

    def _judge_rest(self, world: World, error: BaseException | None) -> None:
        if isinstance(error, Unsettled) and not self._scenario.is_deterministic:
            world.judge.partly(world)
            return
        if error is not None:
            raise Breach("defect", f"the last driver ended with {error!r}")
        world.judge.at_rest(world)

    def _builder(self, name: str) -> Callable[[Send], Driver]:
        def build(send: Send) -> Driver:
            return Driver(
                log=SimLog(send, name),
                sinks=[SimSink(name=sink, send=send, actor=name) for sink in self._sinks],
                engine=SimSpark(send, name),
                read=self._read(name),
                epochs=len(self._source.epochs),
                limits=self._scenario.limits,
                environment=settled_environment(name),
            )

        return build

    def _read(self, name: str) -> Callable[[EpochNumber], Partitions]:
        def read(epoch: EpochNumber) -> Partitions:
            parts = self._source.epochs[epoch]
            if self._scenario.is_deterministic or name == self._scenario.drivers[0]:
                return [[part] for part in parts]
            return [[tuple(f"{OTHER}{row}" for row in part)] for part in parts]

        return read


def _choices(handles: Sequence[str]) -> Sequence[Sequence[str]]:
    """One of them, or all."""
    each = [[handle] for handle in handles]
    return [*each, handles] if len(handles) > 1 else each


@contextmanager
def _found_at(state: State, step: Trace) -> Iterator[None]:
    """A breach within belongs to this step."""
    try:
        yield
    except Breach:
        state.trace = step
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    logging.disable(logging.CRITICAL)
    chosen = _chosen(options.only, is_quick=options.quick)
    walks = []
    for walk in walk_all(chosen, jobs=options.jobs, seconds_max=options.seconds_max):
        walks.append(walk)
        sys.stdout.write(f"{walk}\n")
        sys.stdout.flush()
        for step in walk.trace:
            _say(f"    {step}")
    breaches = sum(walk.breach is not None for walk in walks)
    unfinished = sum(not walk.is_complete for walk in walks)
    sys.stdout.write(
        f"model: {sum(walk.states for walk in walks)} states, "
        f"{sum(walk.transitions for walk in walks)} transitions in {len(walks)} scenarios, "
        f"{unfinished} of them not walked to the end, {breaches} breaches\n"
    )
    return 1 if breaches else 0


def walk_all(
    scenarios: Sequence[Scenario], *, jobs: int = 1, seconds_max: float | None = None
) -> Iterator[Walk]:
    if jobs <= 1:
        yield from (explore(scenario, seconds_max) for scenario in scenarios)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(
            partial(explore, seconds_max=seconds_max), scenarios, chunksize=1
        )


def explore(scenario: Scenario, seconds_max: float | None = None) -> Walk:
    logging.disable(logging.CRITICAL)
    return Explorer(scenario).explore(seconds_max=seconds_max)


def _chosen(names: Sequence[str], *, is_quick: bool) -> Sequence[Scenario]:
    if names:
        return [scenario for scenario in SCENARIOS if scenario.name in names]
    return [scenario for scenario in SCENARIOS if scenario.is_quick or not is_quick]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m proof.model",
        description="Walk every interleaving of small scenarios and check the invariants.",
    )
    parser.add_argument("--quick", action="store_true", help="only the scenarios of the tests")
    parser.add_argument("--only", nargs="*", default=[], help="these scenarios")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds-max", type=float, help="stop a scenario after so long")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
