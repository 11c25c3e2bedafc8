"""`epochal adopt`, `fork`, `rename`, `give-up`: a person's word on a checkpoint and its log."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated

import typer

from epochal.contract import EpochLog
from epochal.coordinator import life
from epochal.logs import checkpoint_log, open_log
from epochal.protocol.admission import Unfinished
from epochal.protocol.state import GivenUp, State
from epochal.spark import identity
from epochal.terms import EpochNumber

Place = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A Spark checkpoint on this machine, the folder of a once-only load, or the log of a "
        "session.",
    ),
]


def adopt(
    checkpoint: Place,
    unfinished: Annotated[
        Unfinished,
        typer.Option(
            help="A batch that other code planned and did not finish: are its rows there?"
        ),
    ] = Unfinished.ASK,
) -> None:
    """
    Bind a moved checkpoint to where it is now, or follow one that other code ran meanwhile.

    A driver that still runs on it is fenced. Stop it first.
    """
    _tell(identity.adopt(_log_at(checkpoint), checkpoint, unfinished=unfinished))


def fork(
    checkpoint: Place,
    is_original_alive: Annotated[
        bool,
        typer.Option(
            "--original-lives",
            help="The original is there and will carry out what it has decided.",
        ),
    ] = False,
) -> None:
    """
    Make a copied checkpoint a pipeline of its own, under a new uid.

    What the original has decided and not yet carried out stays the original's.
    """
    _tell(identity.fork(_log_at(checkpoint), checkpoint, is_original_alive=is_original_alive))


def rename(
    checkpoint: Place,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's new name.")],
) -> None:
    """Give the pipeline of a checkpoint another name."""
    _tell(life.rename(_log_at(checkpoint), pipeline=name))


def give_up(
    checkpoint: Place,
    sink: Annotated[str, typer.Option(help="The sink that will not get its rows.")],
    epoch: Annotated[int, typer.Option(help="The decided epoch, as the error names it.")],
    kept_at: Annotated[str, typer.Option(help="Where the rows are kept instead.")],
    because: Annotated[str, typer.Option(help="Why, for whoever reads the log later.")],
) -> None:
    """
    Let one sink of one decided epoch go, on record: its rows are elsewhere, or brought by hand.

    The way out where a target lost prepared rows and a replay can't be proven to be the same.
    """
    word = GivenUp(
        epoch=EpochNumber(epoch), sink=sink, kept_at=kept_at, by=getpass.getuser(), because=because
    )
    _tell(life.give_up(_log_at(checkpoint), word))


def _log_at(place: str) -> EpochLog:
    """The log inside a checkpoint; else of a once-only load; else the place is a log itself."""
    candidates = [checkpoint_log(place), open_log(f"{place.rstrip('/')}/log"), open_log(place)]
    return next((log for log in candidates if log.numbers()), candidates[0])


def _tell(state: State) -> None:
    sys.stderr.write(
        f"pipeline {state.pipeline!r}, uid {state.uid}, at {state.location}: "
        f"goes on at epoch {state.expected}\n"
    )
