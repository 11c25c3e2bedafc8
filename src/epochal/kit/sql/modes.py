"""Write modes: what happens to a row whose key exists already, and which row of a key wins.

mode         a new key          a key that is there
append       –                  –                      no key is looked at
upsert       is inserted        its row is changed     with `newer`: only by a newer one
replace      is inserted        its rows are deleted, and the row is inserted
insert_new   is inserted        stays as it is
update       is left out        its row is changed     with `newer`: only by a newer one
complete     all rows of the table are deleted, and those of the epoch are inserted
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from epochal.contract import APPEND_ONLY
from epochal.errors import Misconfigured
from epochal.kit.sql.names import TableName

Mode: TypeAlias = Literal["append", "upsert", "replace", "insert_new", "update", "complete"]
Strategy: TypeAlias = Literal["staged", "prepared"]
OnMiss: TypeAlias = Literal["ignore", "reject"]

_MODES = ("append", "upsert", "replace", "insert_new", "update", "complete")
_CHANGING = ("upsert", "update")
_DELETING = ("upsert", "replace", "update")
_STRATEGIES = ("staged", "prepared")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteMode:
    """What happens to rows that are in the table already. Names are those of fields."""

    mode: Mode = "append"
    keys: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    """Of several rows of one key in one epoch the highest by these wins, or with insert_new the
    lowest."""
    newer: str | None = None
    """A row changes or deletes another only where it is higher by this field, in any epoch."""
    delete_when: str | None = None
    """A condition in the database's own SQL: rows that are deletes of their key."""
    delete_as: Mapping[str, str] = field(default_factory=dict)
    """Columns and expressions of the database's SQL: what a delete writes instead of deleting."""
    tombstones: TableName | None = None
    """A table that remembers deleted keys, so that no older row brings one back."""
    skip_unchanged: bool = False
    """Whether a row that would change nothing is not written."""
    on_miss: OnMiss = "ignore"
    """What becomes of rows of `update` whose key is not there."""
    is_truncating: bool = False
    """Whether `complete` empties the table by TRUNCATE."""

    folds_case: bool = False
    """Whether the database finds a column by its name in any case."""
    quotes: str = '"'
    """What the database writes around a name."""

    @property
    def is_keyed(self) -> bool:
        return self.mode not in {"append", "complete"}

    def only_compares(self, field: str) -> bool:
        """Whether a field is never written, only compared with its column."""
        return self.mode == "update" and field in self.keys

    @property
    def needs_unique_key(self) -> bool:
        """Whether the database itself must find the row of a key."""
        return self.mode in {"upsert", "insert_new"}

    @property
    def updates(self) -> bool:
        """Whether existing rows are changed, and not only by soft deletes."""
        return self.mode in _CHANGING

    @property
    def deletes(self) -> bool:
        """Whether rows of the table are deleted."""
        is_hard = self.delete_when is not None and not self.delete_as
        return is_hard or self.mode in {"replace", "complete"}

    @property
    def output_modes(self) -> frozenset[str]:
        if self.mode == "complete":
            return frozenset({"complete"})
        return frozenset({"append", "update"}) if self.is_keyed else APPEND_ONLY


def possible_mode(kind: str, strategy: str, declared: WriteMode) -> WriteMode:
    """The declared mode, or the reason why these options don't go together."""
    _require_known(kind, "mode", declared.mode, _MODES)
    _require_known(kind, "strategy", strategy, _STRATEGIES)
    _require_known(kind, "on_miss", declared.on_miss, ("ignore", "reject"))
    _require(
        strategy == "staged" or declared.mode == "append",
        f"{kind}: strategy='prepared' with mode={declared.mode!r}: an attempt that lost would lock "
        "the rows of the one that won, until it is cleared",
        "strategy='staged' (the default), or mode='append'",
    )
    if declared.is_keyed:
        _require(declared.keys, f"{kind}: mode={declared.mode!r} without keys", 'keys=["id"]')
    for option, modes, why, hint in _ONLY_WITH:
        _require(
            declared.mode in modes or not getattr(declared, option),
            f"{kind}: {_OPTION.get(option, option)} with mode={declared.mode!r}, {why}",
            hint.format(option=_OPTION.get(option, option)),
        )
    for is_met, fact, hint in _combinations(declared):
        _require(is_met, f"{kind}: {fact}", hint)
    return _ordered_by_newer(declared)


_KEYED = tuple(mode for mode in _MODES if mode not in {"append", "complete"})
_LOOKS_AT_NO_KEY = ("which looks at no key", "mode='upsert' or mode='replace', or no {option}")
_OPTION = {"is_truncating": "truncate"}
_ONLY_WITH: Sequence[tuple[str, Sequence[str], str, str]] = (
    ("keys", _KEYED, *_LOOKS_AT_NO_KEY),
    ("order_by", _KEYED, *_LOOKS_AT_NO_KEY),
    (
        "delete_when",
        _DELETING,
        "which deletes no single row",
        "mode='upsert', 'replace' or 'update', or no {option}",
    ),
    (
        "newer",
        _CHANGING,
        "which changes no row in place",
        "mode='upsert' or mode='update'; order_by= says which row of one epoch wins",
    ),
    (
        "delete_as",
        _CHANGING,
        "which changes no row in place",
        "mode='upsert' or mode='update', or no {option}",
    ),
    (
        "skip_unchanged",
        _CHANGING,
        "which compares no row with another",
        "mode='upsert' or mode='update', or no {option}",
    ),
    ("tombstones", ("upsert",), "which brings no deleted row back", "mode='upsert'"),
    ("is_truncating", ("complete",), "which empties no table", "mode='complete'"),
)
"""Options, the modes that they go with, and why not with others."""


def _combinations(mode: WriteMode) -> Iterator[tuple[object, str, str]]:
    """Whether each of these goes together, why not, and the way out."""
    yield (
        mode.newer is None or mode.newer not in mode.keys,
        f"newer={mode.newer!r} is a key: rows of one key would never differ by it",
        'newer="version", a field that grows with each change',
    )
    yield (
        mode.newer is None or not mode.order_by or mode.order_by[0] == mode.newer,
        f"newer={mode.newer!r} and order_by={list(mode.order_by)}: one epoch and the next would "
        "disagree which row is the last",
        f"order_by=[{mode.newer!r}, …], or no order_by",
    )
    yield (
        mode.delete_when is not None or not mode.delete_as,
        "delete_as without delete_when: nothing says which rows are deletes",
        "delete_when=\"op = 'd'\"",
    )
    yield (
        mode.tombstones is None or (mode.newer and mode.delete_when),
        "tombstones without newer and delete_when: there is no older row to keep out",
        'newer="version", delete_when="op = \'d\'"',
    )
    yield (
        not (mode.skip_unchanged and mode.delete_as),
        "skip_unchanged with delete_as: a deleted row that comes back unchanged would stay deleted",
        "leave out one of the two",
    )
    yield (
        mode.on_miss == "ignore" or mode.mode == "update",
        f"on_miss={mode.on_miss!r} with mode={mode.mode!r}, which misses no row",
        "mode='update'",
    )


def _ordered_by_newer(mode: WriteMode) -> WriteMode:
    """Within an epoch the same order holds as between epochs."""
    if mode.newer is None or mode.order_by:
        return mode
    return replace(mode, order_by=(mode.newer,))


def require_reject(kind: str, on_reject: object, strategy: str) -> None:
    """`on_reject` is "fail", or a sink, which only the staged strategy can send rows to."""
    if isinstance(on_reject, str):
        _require(
            on_reject == "fail",
            f"{kind}: on_reject={on_reject!r}",
            "'fail', or the sink that rejected rows go to: on_reject=Files('/data/rejected')",
        )
    else:
        _require(
            strategy == "staged",
            f"{kind}: on_reject=<sink> with strategy='prepared', which looks at no row again",
            "strategy='staged'",
        )


def as_names(given: Sequence[str] | str) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _require(is_met: object, fact: str, hint: str) -> None:
    if not is_met:
        raise Misconfigured(fact, hint)


def _require_known(kind: str, option: str, value: str, known: Sequence[str]) -> None:
    _require(value in known, f"{kind}: {option}={value!r}", f"one of {', '.join(known)}")
