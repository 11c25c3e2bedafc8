"""
A seeded simulation: `python -m proof.simulation --seeds 100000`.

Drivers run as they are shipped, each in a greenlet of its own, in a world of virtual time. At
every call they make outside, the seed chooses: which driver goes on and which is suspended; whether
the call fails, hangs for good, conflicts with another, loses its answer, lands later or twice;
whether its driver loses sight of the log or of a target for a while, or dies before or after it;
whether the source is idle; whether a person pauses the pipeline; whether a target throws prepared
rows away, rejects them, or a gate refuses them. Dead and stopped drivers are replaced, also while
the old one still runs; sinks come and go between starts. Then the trouble ends. A driver without
rows to read is idle while what is still on its way lands, tasks of older drivers included, and must
sweep it away; a last driver starts and stops, and the judge looks at what is visible and what is
left.

A seed is a whole run: `--seed S` replays it alone and prints every call.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from greenlet import greenlet

from epochal.coordinator import Environment, Gate, PreparedEpoch, by_hand
from epochal.coordinator.retry import OnEnd, OnLate, StillRunning
from epochal.errors import OutcomeUnknown, RowRejected, TryAgain
from epochal.terms import Claim, EpochNumber, Limits, SinkName, Uid
from epochal.testing.crash import Breach
from epochal.testing.driver import Crash, Driver, Partitions, ends_by_the_rules
from proof.calls import SPARK, Call, SimLog, SimSink, SimSpark
from proof.judge import OTHER
from proof.world import Source, World

_CALLS_MAX = 20_000
_LIVES_MAX = 7
_SINKS = tuple(SinkName(name) for name in ("left", "middle", "right"))
_LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
_PROGRESS_EVERY_S = 5.0

LIMITS = Limits(
    commit_timeout_s=1.0,
    commit_retry_max_s=4.0,
    abort_timeout_s=1.0,
    decide_retry_max_s=2.0,
    retry_backoff_ms=(100, 500, 1000),
    sweep_every_s=3.0,
    log_records_kept=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """How bad one run is: chances per call, drawn once per seed."""

    crash: float
    fail: float
    lose_answer: float
    late: float
    conflict: float
    twice: float
    slow: float
    sleep: float
    hang: float
    cut_off: float
    expire: float
    reject: float
    speculate: float
    idle: float
    second_driver: float
    pause: float
    changes_sinks: bool
    lists_receipts: bool
    """Whether receipts lie beside the log: as those of epochs of many tasks do."""
    is_deterministic: bool
    """Whether a replayed epoch gives the same rows."""

    @classmethod
    def drawn(cls, chance: random.Random) -> Weather:
        def some(most: float) -> float:
            return chance.choice((0.0, most / 4, most))

        return cls(
            crash=some(0.03),
            fail=some(0.10),
            lose_answer=some(0.10),
            late=some(0.10),
            conflict=some(0.05),
            twice=some(0.05),
            slow=some(0.1),
            sleep=some(0.02),
            hang=some(0.02),
            cut_off=some(0.01),
            expire=some(0.01),
            reject=some(0.05),
            speculate=some(0.5),
            idle=some(0.3),
            second_driver=some(0.03),
            pause=some(0.05),
            changes_sinks=chance.random() < 0.2,
            lists_receipts=chance.random() < 0.5,
            is_deterministic=chance.random() < 0.9,
        )


class VirtualClock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now(self) -> float:
        return self.time_s

    def monotonic(self) -> float:
        return self.time_s

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def wait_until(self, time_s: float) -> None:
        self.time_s = max(self.time_s, time_s)


class Hangs(BaseException):
    """
    Ends the job whose call hangs, as the thread that runs it would stay behind. Not an Exception:
    no code of the driver may catch it, as none sees a call that does not return.
    """


@dataclass(eq=False)
class Life:
    """One driver, from its start to its end."""

    name: str
    thread: greenlet
    call: Call | None = None
    """What it waits for an answer to."""
    cut_off_until_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """Rooms that it has lost sight of."""
    asleep_until_call: int = 0
    """Suspended, as by SIGSTOP or a long collection of garbage, while others go on."""
    error: BaseException | None = None
    is_over: bool = False
    sinks: Sequence[SinkName] = ()
    has_swept: bool = False
    """It was idle after the trouble had ended."""


@dataclass
class Simulation:
    seed: int
    keeps_trace: bool = False
    trace: list[str] = field(default_factory=list)
    changes_sinks: bool = True
    copy_of: World | None = None
    """Another world, whose log and checkpoint these are copies of."""

    def __post_init__(self) -> None:
        self._side = "D" if self.copy_of is None else "C"
        self._chance = random.Random(f"{self.seed}{self._side}")
        drawn = Weather.drawn(self._chance)
        self._weather = replace(drawn, changes_sinks=drawn.changes_sinks and self.changes_sinks)
        self.world = self.copy_of or World(self._drawn_source(), _SINKS)
        self._clock = VirtualClock()
        self._flying: list[Call] = []
        """Calls on their way, whose callers no longer listen."""
        self._lives: list[Life] = []
        self._persons_nonces = iter(f"person-{at}" for at in range(_CALLS_MAX))
        self._born = 0
        self.calls = 0
        self._is_calm = False
        self._scheduler = greenlet.getcurrent()
        self._sinks: Sequence[SinkName] = _SINKS[:2]

    def _drawn_source(self) -> Source:
        sizes = [
            [self._chance.randrange(3) for _ in range(self._chance.randrange(4))]
            for _ in range(self._chance.randrange(1, 5))
        ]
        return Source.of(*sizes)

    def run(self) -> int:
        """Simulate this seed; returns the number of calls, raises `Breach`."""
        self.run_for(_CALLS_MAX)
        self.calm_down()
        return self.calls

    def run_for(self, calls: int) -> None:
        """The same, but for so many calls, and without the end."""
        self.step()
        while self.is_running and self.calls < calls:
            self.step()

    @property
    def is_running(self) -> bool:
        return bool(self._lives)

    # The trouble

    def step(self) -> None:
        if not self._born:
            self._bear()
        if self._flying and self._happens(0.2):
            self._land_one()
        if self._happens(self._weather.expire):
            self._expire_some(self._chance.choice(_SINKS))
        if self._happens(self._weather.second_driver):
            self._bear()
        if self._happens(self._weather.pause):
            self._pause_and_resume()
        if self._lives and not self._awake():
            self._bear()
        if self._lives:
            self._answer(self._chance.choice(self._awake() or self._lives))
        if not self._lives and self._born < _LIVES_MAX:
            self._bear()

    def _awake(self) -> list[Life]:
        return [life for life in self._lives if life.asleep_until_call <= self.calls]

    def _happens(self, chance: float) -> bool:
        return not self._is_calm and chance > 0 and self._chance.random() < chance

    def _land_one(self) -> None:
        call = self._flying.pop(self._chance.randrange(len(self._flying)))
        self._note(f"late: {call}")
        self.world.land_late(call)

    def _expire_some(self, sink: SinkName) -> None:
        target = self.world.targets[sink]
        handles = sorted(target.prepared)
        if handles and self._chance.random() < 0.5:
            handles = [self._chance.choice(handles)]
        if handles:
            self._note(f"{target.name} throws away {', '.join(handles)}")
            self.world.expire(target.name, handles)

    def _pause_and_resume(self) -> None:
        """A person pauses, and resumes before a driver has noticed: each goes on above both."""

        def send(call: Call) -> Any:
            self.world.issue(call)
            return self.world.land(call)

        log = SimLog(send, "person")
        if log.numbers():
            self._note("a person pauses and resumes")
            environment = Environment(clock=self._clock, nonce=lambda: next(self._persons_nonces))
            by_hand.pause(log, by="person", because="hand-over", environment=environment)
            by_hand.resume(log, by="person", environment=environment)

    def _answer(self, life: Life) -> None:
        call = life.call
        if call is None:
            raise Breach("harness", f"{life.name} waits for nothing")
        self.calls += 1
        if self._happens(self._weather.sleep):
            life.asleep_until_call = self.calls + self._chance.choice((30, 100, 300))
            self._note(f"{life.name} sleeps before {call}")
            return
        if self._happens(self._weather.slow):
            self._clock.sleep(self._chance.choice((0.1, 1.0, 5.0)))
        self.world.issue(call)
        if call.verb == "commit" and self._happens(self._weather.expire * 10):
            self._expire_some(SinkName(call.name))
        if call.room != SPARK and self._disturbed(life, call):
            return
        if self._happens(self._weather.crash):
            self._kill(life, f"before {call}")
            return
        self._deliver(life, call)
        if not life.is_over and self._happens(self._weather.crash / 4):
            self._kill(life, f"after {call}")

    def _disturbed(self, life: Life, call: Call) -> bool:
        """Whether the caller gets an error instead of an answer."""
        weather = self._weather
        if self._is_cut_off(life, call):
            if call.changes_something and self._chance.random() < 0.5:
                self._flying.append(call)
            self._raise_in(life, OutcomeUnknown("out of sight"), f"out of sight: {call}")
        elif self._happens(weather.fail):
            self._raise_in(life, TryAgain("nothing happened"), f"fails: {call}")
        elif call.verb == "put_if_absent" and self._happens(weather.conflict):
            # What an object store answers where a delete meets a create: 409.
            answer = self.world.conflict()
            if answer is not None:
                self._switch(life, answer)
                return True
            self._raise_in(life, OutcomeUnknown("409: ask again"), f"conflict: {call}")
        elif call.identity is not None and self._happens(weather.hang):
            if call.changes_something and self._chance.random() < 0.5:
                self._flying.append(call)
            self.world.judge.hangs(call)
            self._raise_in(life, Hangs(), f"hangs: {call}")
        elif call.verb == "rehearse" and self._happens(weather.reject):
            self._raise_in(life, RowRejected("the target never takes it"), f"rejected: {call}")
        elif self._happens(weather.lose_answer):
            self._note(f"half or whole, no answer: {call}")
            self.world.land_unheard(self._maybe_half(call))
            self._raise_in(life, OutcomeUnknown("the answer was lost"), "")
        elif call.changes_something and self._happens(weather.late):
            self._flying.append(call)
            self._raise_in(life, OutcomeUnknown("no answer in time"), f"sent, not arrived: {call}")
        else:
            # Not of a task: Spark runs a task twice as two attempts, with two handles (I6).
            if call.changes_something and call.verb != "prepare" and self._happens(weather.twice):
                self._flying.append(call)
            return False
        return True

    def _is_cut_off(self, life: Life, call: Call) -> bool:
        """Not only this call: all that follow to the same room, until it is seen again."""
        room = (call.room, call.name)
        if self._happens(self._weather.cut_off):
            life.cut_off_until_s[room] = self._clock.time_s + self._chance.choice((1.0, 5.0))
        return not self._is_calm and self._clock.time_s < life.cut_off_until_s.get(room, 0.0)

    def _maybe_half(self, call: Call) -> Call:
        if call.verb != "commit" or self._chance.random() < 0.5:
            return call
        return Call(call.actor, call.room, call.name, "commit_half", call.args, call.identity)

    def _deliver(self, life: Life, call: Call) -> None:
        if call.room == SPARK and call.verb == "twice":
            self._switch(life, self._happens(self._weather.speculate))
            return
        if call.room == SPARK and call.verb == "idle":
            self._switch(life, self._is_idle(life))
            return
        try:
            answer = self.world.land(call)
        except Breach:
            raise
        except Exception as error:  # noqa: BLE001  what the target says, the driver hears
            self._raise_in(life, error, f"{call} → {type(error).__name__}")
            return
        self._note(f"{call} → {answer}" if answer is not None else str(call))
        self.world.judge.answered(call)
        self._switch(life, answer)

    def _is_idle(self, life: Life) -> bool:
        """Whether the source has no rows for a while, at the end of the trouble for a last time."""
        if self._is_calm and life.has_swept:
            self.world.judge.idle(self.world, life.sinks)
            return False
        is_idle = self._happens(self._weather.idle) or (self._is_calm and bool(self._flying))
        if is_idle:
            while self._is_calm and self._flying:
                self._land_one()
            life.has_swept = self._is_calm
            self._note(f"{life.name} is idle")
            self._clock.sleep(LIMITS.sweep_every_s)
        return is_idle

    def _parallel(
        self,
        name: str,
        jobs: Sequence[Callable[[], None]],
        *,
        late_s: Sequence[float],
        give_up_s: float,
        on_end: OnEnd,
        on_late: OnLate,
    ) -> Sequence[BaseException | None]:
        """One job after the other; those that hang are waited for together, to the deadline."""
        began_s, marks_s = self._clock.time_s, sorted(one for one in late_s if one < give_up_s)
        results: list[BaseException | None] = [StillRunning("it hangs") for _ in jobs]
        hanging = []
        for at, job in enumerate(jobs):
            try:
                job()
                results[at] = None
            except Hangs:
                hanging.append(at)
                continue
            except Exception as error:  # noqa: BLE001  as in threads: the caller sorts it
                results[at] = error
            on_end(at, results[at])
            is_last = at + 1 == len(jobs) and not hanging
            while marks_s and self._clock.time_s >= began_s + marks_s[0] and not is_last:
                on_late(marks_s.pop(0))
        if hanging:
            for mark_s in marks_s:
                self._clock.wait_until(began_s + mark_s)
                on_late(mark_s)
            self.world.judge.kept_waiting(name)
            self._clock.wait_until(began_s + give_up_s)
        for at in hanging:
            on_end(at, results[at])
        return results

    # Lives

    def _bear(self) -> None:
        if self._born >= _LIVES_MAX and not self._is_calm:
            return
        self._born += 1
        if self._weather.changes_sinks and not self._is_calm and self._born > 1:
            self._sinks = tuple(sorted(self._chance.sample(_SINKS, self._chance.randrange(1, 4))))
        name = f"{self._side}{self._born}"
        life = Life(name, greenlet(self._live), sinks=self._sinks)
        self._note(f"{name} starts with {', '.join(self._sinks)}")
        self._lives.append(life)
        self._switch(life, life, self._driver(name, self._sinks))

    def _live(self, life: Life, driver: Driver) -> None:
        try:
            driver.run()
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001  the caller looks at the error of the life
            life.error = error
        life.is_over = True

    def _driver(self, name: str, sinks: Sequence[SinkName]) -> Driver:
        nonces = iter(f"{name}-{at}" for at in range(_CALLS_MAX))
        own = random.Random(f"{self.seed} {name}")
        return Driver(
            log=SimLog(self._send, name),
            sinks=[SimSink(name=sink, send=self._send, actor=name) for sink in sinks],
            engine=SimSpark(self._send, name, idles=True),
            read=self._read,
            epochs=len(self.world.source.epochs),
            limits=replace(LIMITS, receipts_inline_bytes=0)
            if self._weather.lists_receipts
            else LIMITS,
            gates=[self._gate(name)],
            environment=Environment(
                clock=self._clock,
                random=own.random,
                nonce=lambda: next(nonces),
                new_uid=lambda: Uid("".join(own.choice(_LETTERS) for _ in range(12))),
                new_claim=lambda: Claim("".join(own.choice(_LETTERS) for _ in range(8))),
                parallel=partial(self._parallel, name),
            ),
        )

    def _read(self, epoch: EpochNumber) -> Partitions:
        """The rows; on a replay they may be cut into other partitions, or be others altogether."""
        parts = self.world.source.epochs[epoch]
        if epoch in self.world.judge.decided and not self._weather.is_deterministic:
            return [[tuple(f"{OTHER}{row}" for row in part)] for part in parts]
        if epoch in self.world.judge.decided and self._happens(0.3):
            return [[self.world.source.rows(epoch)]]
        return [[part] for part in parts]

    def _gate(self, name: str) -> Gate:
        def gate(epoch: PreparedEpoch) -> bool | str:
            rows = {epoch.rows(sink) for sink in epoch.prepared}
            if len(rows) > 1:
                return f"{name}: sinks differ: {rows}"
            return not self._happens(0.02)

        return gate

    def _send(self, call: Call) -> Any:
        """Where a driver's greenlet hands over to the schedule, and gets its answer from it."""
        return self._scheduler.switch(call)

    def _switch(self, life: Life, *answer: Any) -> None:
        life.call = life.thread.switch(*answer)
        self._look_at(life)

    def _raise_in(self, life: Life, error: BaseException, note: str) -> None:
        if note:
            self._note(note)
        life.call = life.thread.throw(error)
        self._look_at(life)

    def _kill(self, life: Life, when: str) -> None:
        self._note(f"{life.name} dies {when}")
        while not life.is_over:
            life.call = life.thread.throw(Crash())
        self._lives.remove(life)

    def _look_at(self, life: Life) -> None:
        if not life.is_over:
            return
        self._lives.remove(life)
        end = "cleanly" if life.error is None else repr(life.error)
        self._note(f"{life.name} ends {end}")
        if isinstance(life.error, Breach):
            raise life.error
        self.world.judge.ended(life.name, life.error)
        if life.error is not None and not ends_by_the_rules(life.error):
            raise Breach("defect", f"{life.name} ended with {life.error!r}") from life.error

    def _note(self, text: str) -> None:
        if self.keeps_trace:
            self.trace.append(f"{self._clock.time_s:9.2f}  {text}")

    # The end

    def calm_down(self) -> None:
        """No more trouble: the living come to their end, what flies lands, a last driver starts."""
        self._is_calm = True
        self._note("calm")
        while self._lives:
            self._answer(self._lives[0])
        self.world.judge.partly(self.world)
        self._last_driver()
        while self._flying:
            self._land_one()
        error = self._last_driver()
        self._note(f"the last driver ends {error!r}")
        self.world.judge.concluded(
            self.world, error, is_deterministic=self._weather.is_deterministic
        )

    def _last_driver(self) -> BaseException | None:
        truth = self.world.judge.truth
        if truth is not None and truth.pending:
            self._sinks = tuple(sorted({*self._sinks, *truth.pending}))
        if self._weather.changes_sinks:
            self._sinks = _SINKS
        self._bear()
        life = self._lives[-1]
        while not life.is_over:
            self._answer(life)
        return life.error


@dataclass(frozen=True, slots=True)
class Verdict:
    seed: int
    calls: int
    breach: str = ""


def simulate(seed: int) -> Verdict:
    """One log, and then, of another run with the same trouble, two copies of one."""
    from proof.clones import simulate_clones  # noqa: PLC0415  it is made of this module

    try:
        return Verdict(seed, Simulation(seed).run() + simulate_clones(seed))
    except Breach as breach:
        return Verdict(seed, 0, str(breach))


def simulate_all(seeds: Sequence[int], jobs: int = 1) -> Iterator[Verdict]:
    """Every seed's verdict, in any order."""
    if jobs <= 1:
        yield from map(simulate, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, initializer=_quiet) as pool:
        yield from pool.imap_unordered(simulate, seeds, chunksize=64)


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    _quiet()
    if options.seed is not None:
        return _replay(options.seed)
    began_s, reported_s, done, calls, breaches = time.monotonic(), 0.0, 0, 0, 0
    seeds = range(options.first, options.first + options.seeds)
    for verdict in simulate_all(seeds, options.jobs):
        done, calls = done + 1, calls + verdict.calls
        if verdict.breach:
            breaches += 1
            _say(f"seed {verdict.seed}: {verdict.breach}")
            _say(f"  replay: python -m proof.simulation --seed {verdict.seed}")
        if time.monotonic() - reported_s > _PROGRESS_EVERY_S:
            reported_s = time.monotonic()
            _say(f"{done} of {options.seeds} seeds, {calls} calls, {breaches} breaches")
    spent_s = time.monotonic() - began_s
    sys.stdout.write(f"sim: {done} seeds, {calls} calls, {breaches} breaches, {spent_s:.0f} s\n")
    return 1 if breaches else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m proof.simulation",
        description="Run the shipped coordinator through seeded trouble and judge what is left.",
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one seed and print every call")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args(arguments)


def _replay(seed: int) -> int:
    """Both runs of a seed, or up to its breach."""
    from proof.clones import simulate_clones  # noqa: PLC0415  it is made of this module

    simulation = Simulation(seed, keeps_trace=True)
    of_clones: list[str] = []
    breach = ""
    try:
        simulation.run()
        simulate_clones(seed, trace=of_clones)
    except Breach as found:
        breach = str(found)
    for line in [*simulation.trace, *of_clones]:
        _say(line)
    sys.stdout.write(f"sim: seed {seed}: {breach or 'no breach'}\n")
    return 1 if breach else 0


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
