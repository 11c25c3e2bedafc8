"""A pipeline on Spark into a table that others change between any two of its steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_stage import Killer, Source

from epochal.contract import Sink
from epochal.errors import TryAgain, Unsettled
from epochal.spark.pipeline import Pipeline

STEPS = ("begun", "prepared", "rehearsed", "decided", "committed f")
SCHEMA = "id bigint, v string, area string, quantity int"
ROWS = 8
_TRIES_MAX = 12


def row(number: int) -> dict[str, Any]:
    """A row; its values follow from its number."""
    area = None if number % 5 == 0 else f"{'nesw'[number % 4]}{number % 3}"
    return {"id": number, "v": f"v{number}", "area": area, "quantity": number % 7}


@dataclass
class ChangingLake:
    """
    Epochs of a table whose columns and partitions change by chance, by a driver that dies by
    chance. All changes leave rows of `SCHEMA` a place in the table.
    """

    source: Source
    checkpoint: Path
    killer: Killer
    sink: Sink
    verbs: Sequence[Callable[[], None]]
    chance: random.Random
    done: list[str] = field(default_factory=list)
    deaths: int = 0

    def epochs(self, count: int) -> Iterator[list[dict[str, Any]]]:
        """After each epoch: all rows that were written so far."""
        pipeline = Pipeline("changing", [self.sink], watch=self._watch)
        for epoch in range(count):
            rows = [row(epoch * ROWS + at) for at in range(ROWS)]
            self.source.add(rows)
            self._run(pipeline, epoch)
            yield self.source.rows

    def _run(self, pipeline: Pipeline, epoch: int) -> None:
        for _ in range(_TRIES_MAX):
            if self.chance.random() < 0.5:
                self.killer.at = (self.chance.choice(STEPS), epoch)
            try:
                if not self.killer.run(pipeline, self.source.stream, self.checkpoint):
                    return
                self.deaths += 1
            except Exception:
                # Its table was changed while rows were written for it, or after they were decided.
                if not isinstance(pipeline.error, (TryAgain, Unsettled)):
                    raise
            self.killer.at = None
        raise AssertionError(f"epoch {epoch} was never written: {self.done}")

    def _watch(self, step: str, epoch: int | None) -> None:
        if step in STEPS and self.chance.random() < 0.25:
            verb = self.chance.choice(self.verbs)
            self.done.append(f"{verb.__name__} {step} {epoch}")
            verb()
        self.killer.watch(step, epoch)
