"""Write modes: what happens to a row whose key exists already, and which row of a key wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from epochal.contract import APPEND_ONLY
from epochal.errors import Misconfigured

Mode: TypeAlias = Literal["append", "upsert", "replace"]
Strategy: TypeAlias = Literal["staged", "prepared"]

_MODES = ("append", "upsert", "replace")
_STRATEGIES = ("staged", "prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMode:
    """What happens to rows that are in the table already. Names are those of fields."""

    mode: Mode = "append"
    keys: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    """Of several rows of one key in one epoch the highest by these wins."""
    delete_when: str | None = None
    """A condition in the database's own SQL: rows that are deletes of their key."""

    folds_case: bool = False
    """Whether the database finds a column by its name in any case."""
    quotes: str = '"'
    """What the database writes around a name."""

    @property
    def is_keyed(self) -> bool:
        return self.mode != "append"

    @property
    def output_modes(self) -> frozenset[str]:
        return frozenset({"append", "update"}) if self.is_keyed else APPEND_ONLY


def write_mode(
    kind: str,
    *,
    mode: str,
    strategy: str,
    keys: Sequence[str] | str,
    order_by: Sequence[str] | str,
    delete_when: str | None,
    folds_case: bool = False,
    quotes: str = '"',
) -> WriteMode:
    """The declared mode, or the reason why these options don't go together."""
    _require_known(kind, "mode", mode, _MODES)
    _require_known(kind, "strategy", strategy, _STRATEGIES)
    chosen = WriteMode(
        mode=mode,  # type: ignore[arg-type] # one of _MODES, see above
        keys=_names(keys),
        order_by=_names(order_by),
        delete_when=delete_when,
        folds_case=folds_case,
        quotes=quotes,
    )
    if chosen.is_keyed:
        _require(chosen.keys, f"{kind}: mode={mode!r} without keys", 'keys=["id"]')
        _require(
            strategy == "staged",
            f"{kind}: strategy='prepared' with mode={mode!r}: an attempt that lost would lock the "
            "keys of the one that won, until it is cleared",
            "strategy='staged' (the default), or mode='append'",
        )
    else:
        for option in ("keys", "order_by", "delete_when"):
            _require(
                not getattr(chosen, option),
                f"{kind}: {option} with mode='append', which looks at no key",
                f"mode='upsert' or mode='replace', or no {option}",
            )
    return chosen


def require_reject(kind: str, on_reject: object, strategy: str) -> None:
    """`on_reject` is "fail", or a sink, which only the staged strategy can send rows to."""
    if isinstance(on_reject, str):
        _require_known(kind, "on_reject", on_reject, ("fail",))
    else:
        _require(
            strategy == "staged",
            f"{kind}: on_reject=<sink> with strategy='prepared', which looks at no row again",
            "strategy='staged'",
        )


def _names(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _require(is_met: object, fact: str, hint: str) -> None:
    if not is_met:
        raise Misconfigured(fact, hint)


def _require_known(kind: str, option: str, value: str, known: Sequence[str]) -> None:
    _require(value in known, f"{kind}: {option}={value!r}", f"one of {', '.join(known)}")
