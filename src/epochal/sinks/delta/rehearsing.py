"""What a table demands of rows, asked of the prepared files before the decision (I3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from epochal.errors import RowRejected
from epochal.sinks.delta.checking import Plan
from epochal.sinks.delta.merging import IS_DELETE, require_one_winner, winners
from epochal.sinks.delta.place import Place
from epochal.sinks.delta.schema import Fit, Rule
from epochal.sinks.delta.staged import ROWS, StagedRows, quoted, staged_rows
from epochal.terms import EpochNumber, Receipt

if TYPE_CHECKING:
    from epochal.sinks.delta.sink import Delta

_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """One epoch's receipts on their way to a decision."""

    sink: Delta
    place: Place
    epoch: EpochNumber
    receipts: Sequence[Receipt]

    def judge(self, plan: Plan) -> None:
        """Raise `RowRejected` where the table would not take these rows. Reads them if it must."""
        files = [file for receipt in self.receipts for file in files_of(receipt)]
        if not files:
            return
        is_merge = self.sink.mode == "merge"
        fitted = plan.fit
        if not is_merge and fitted is not None:
            self._require_no_nulls(fitted)
        rules = () if fitted is None else fitted.rules
        if is_merge and fitted is not None:
            rules = (*rules, *_not_null(fitted))
        if not rules and not is_merge:
            return
        absent = {} if fitted is None else fitted.absent
        with staged_rows(
            self.place, files, {} if is_merge else {**absent, **self._folders()}
        ) as rows:
            if is_merge:
                require_one_winner(self.sink, rows, self.epoch)
            for rule in rules:
                self._require(rows, rule)

    def _folders(self) -> Mapping[str, str]:
        """The columns that folders stand for, as text: casts are the engine's."""
        return {
            name: "string"
            for receipt in self.receipts
            for file in files_of(receipt)
            for name in file["partition"]
        }

    def _require_no_nulls(self, fitted: Fit) -> None:
        nulls = {
            name for receipt in self.receipts for name in cast("Any", receipt.token["nulls"])
        } | {
            name
            for receipt in self.receipts
            for file in files_of(receipt)
            for name, value in file["partition"].items()
            if value is None
        }
        refused = sorted(nulls & set(fitted.not_null))
        if refused:
            raise RowRejected(
                f"epoch {self.epoch}: {self.sink.target} wants no null in {', '.join(refused)}, "
                "and the rows have some",
                'where="… IS NOT NULL", or fill them in with select=',
            )

    def _require(self, rows: StagedRows, rule: Rule) -> None:
        among = ROWS if self.sink.mode != "merge" else f"({winners(self.sink)})"
        kept = "" if self.sink.mode != "merge" else f" AND NOT {IS_DELETE}"
        found = rows.rows(
            f"SELECT * FROM {among} WHERE (({rule.expression}) IS NOT TRUE){kept} LIMIT 1"  # noqa: S608  names are quoted
        )
        if found:
            raise RowRejected(
                f"epoch {self.epoch}: a row breaks {rule.name!r} ({rule.expression}) of "
                f"{self.sink.target}: {str(found[0])[:_SHOWN_CHARACTERS]}",
                'leave such rows out with where="…", or change the table',
            )


def files_of(receipt: Receipt) -> Sequence[Mapping[str, Any]]:
    """The files that a receipt names, each as its writer told it."""
    return cast("Sequence[Mapping[str, Any]]", receipt.token.get("files", ()))


def _not_null(fitted: Fit) -> tuple[Rule, ...]:
    return tuple(
        Rule(name=f"NOT NULL of {name}", expression=f"{quoted(name)} IS NOT NULL")
        for name in fitted.not_null
        if name in fitted.written
    )
