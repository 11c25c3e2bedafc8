"""
What the model checker walks: small worlds whose union is the list of troubles.

Each one is walked whole, so each is bounded somewhere; the bounds are printed beside the number
of its states. Quick ones are walked by the tests, all of them by `make proof ONLY=model`.
"""

from __future__ import annotations

from dataclasses import dataclass

from epochal.terms import Limits

ALL_KINDS = frozenset({"crash", "fail", "half", "late", "lost"})
"""
Faults of one call: its driver dies before it; it fails; half of a commit happens and the answer
is lost; it lands at any later time and the answer is lost; it happens and the answer is lost.
"""

IMPATIENT = Limits(
    decide_retry_max_s=0.0, commit_retry_max_s=0.0, retry_backoff_ms=(1000,), log_records_kept=64
)
"""One unanswered call and the driver gives up: the shortest way to what a given-up driver does."""
PATIENT = Limits(
    decide_retry_max_s=1.0, commit_retry_max_s=1.0, retry_backoff_ms=(1000,), log_records_kept=64
)
"""Unanswered calls are asked after."""
TIDY = Limits(
    decide_retry_max_s=0.0,
    commit_retry_max_s=0.0,
    retry_backoff_ms=(1000,),
    log_records_kept=0,
    sweep_every_s=0.0,
)
"""Every sweep deletes records, and every epoch begins with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is walked, and how far."""

    name: str
    about: str
    drivers: str = "AB"
    sinks: tuple[str, ...] = ("x", "y")
    sizes: tuple[tuple[int, ...], ...] = ((1, 1),)
    """Rows of each partition of each epoch."""
    faults: int = 0
    expiries: int = 0
    """How often a target throws prepared rows away."""
    speculates: bool = False
    """Whether a second attempt of a task may also succeed, and win."""
    reads_fail: bool = False
    kinds: frozenset[str] = ALL_KINDS
    is_deterministic: bool = True
    limits: Limits = IMPATIENT
    is_quick: bool = True
    """Part of the default run of the tests."""

    @property
    def bounds(self) -> str:
        bounds = [
            f"{len(self.drivers)} drivers",
            f"{len(self.sinks)} sinks",
            f"{len(self.sizes)} epochs of {max(map(len, self.sizes))} tasks",
            f"{self.faults} faults",
        ]
        if self.faults:
            bounds.append("each of: " + ", ".join(sorted(self.kinds)))
        if self.expiries:
            bounds.append(f"rows thrown away {self.expiries} times")
        if self.speculates:
            bounds.append("second attempts")
        if not self.is_deterministic:
            bounds.append("other rows on a replay")
        return ", ".join(bounds)


_ONE = ((1,),)

SCENARIOS = (
    Scenario(name="takeover", about="a second driver claims at any moment"),
    Scenario(
        name="deleted",
        about="records are deleted behind a driver that sleeps",
        sinks=("x",),
        sizes=((1,), (1,)),
        limits=TIDY,
    ),
    Scenario(name="fault", about="one fault and a takeover", sinks=("x",), sizes=_ONE, faults=1),
    Scenario(
        name="faults",
        about="two faults in one driver's life that gives up at once",
        drivers="A",
        faults=2,
    ),
    Scenario(
        name="patient",
        about="two faults in one driver's life that asks again",
        drivers="A",
        faults=2,
        limits=PATIENT,
    ),
    Scenario(
        name="attempts",
        about="tasks of two attempts, both of which may succeed, and a fault",
        drivers="A",
        speculates=True,
        faults=1,
    ),
    Scenario(
        name="empty",
        about="an epoch without a row between two others",
        drivers="A",
        sizes=((1,), (), (1,)),
        faults=1,
    ),
    Scenario(
        name="thrown-away",
        about="a target throws prepared rows away",
        drivers="A",
        expiries=1,
        faults=1,
    ),
    Scenario(
        name="thrown-away-other",
        about="a target throws prepared rows away, and the replay gives others",
        drivers="AB",
        sinks=("x",),
        sizes=_ONE,
        expiries=1,
        is_deterministic=False,
    ),
    Scenario(
        name="takeover-fault",
        about="a takeover and a fault, two sinks",
        sizes=_ONE,
        faults=1,
        is_quick=False,
    ),
    Scenario(
        name="takeover-faults",
        about="a takeover and two faults",
        sinks=("x",),
        sizes=_ONE,
        faults=2,
        is_quick=False,
    ),
    Scenario(
        name="deleted-fault",
        about="records deleted behind a sleeper, and a fault",
        sinks=("x",),
        sizes=((1,), (1,)),
        limits=TIDY,
        faults=1,
        is_quick=False,
    ),
    Scenario(
        name="thrown-away-takeover",
        about="a target throws prepared rows away while two drivers are at work",
        sinks=("x",),
        expiries=1,
        is_quick=False,
    ),
    Scenario(
        name="whole",
        about="everything: two drivers, two sinks, two tasks of two attempts, one fault",
        speculates=True,
        faults=1,
        is_quick=False,
    ),
)
