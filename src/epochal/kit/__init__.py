"""
The kit for sinks: base classes, engines and terms; the one place that a sink imports from.

    from epochal import kit

    class MySink(kit.SinkBase): ...

Every name loads on first use, so that `import epochal.kit` loads no driver and no engine, and a
task loads only what its writer needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from epochal.contract import (
        APPEND_ONLY,
        Begin,
        Committer,
        Deadline,
        EngineWrite,
        EngineWrites,
        EngineWritten,
        Select,
        Sink,
        Task,
        Writer,
    )
    from epochal.errors import (
        Backpressure,
        EpochalError,
        Fenced,
        InvariantBroken,
        Misconfigured,
        OutcomeUnknown,
        PreparedLost,
        Refused,
        RowRejected,
        TryAgain,
        WentBack,
        copy_at_work,
        require_still_committed,
    )
    from epochal.kit.secrets import EnvironmentSecret, FileSecret, HeldSecret, Secret, env, file
    from epochal.kit.sink_base import CommitterBase, Dropped, Operable, Promises, Recount, SinkBase
    from epochal.kit.staged_committer import LedgerEntry, StagedCommitter, Transaction
    from epochal.terms import (
        Ability,
        Claim,
        EpochNumber,
        Fingerprint,
        Handle,
        Identity,
        InDoubt,
        Json,
        Limits,
        Mark,
        Offsets,
        Proof,
        Receipt,
        SinkName,
        Uid,
        handle_prefix,
    )

_CONTRACT = (
    "APPEND_ONLY", "Begin", "Committer", "Deadline", "EngineWrite", "EngineWrites",
    "EngineWritten", "Select", "Sink", "Task", "Writer",
)  # fmt: skip
_ERRORS = (
    "Backpressure", "EpochalError", "Fenced", "InvariantBroken", "Misconfigured", "OutcomeUnknown",
    "PreparedLost", "Refused", "RowRejected", "TryAgain", "WentBack", "copy_at_work",
    "require_still_committed",
)  # fmt: skip
_TERMS = (
    "Ability", "Claim", "EpochNumber", "Fingerprint", "Handle", "Identity", "InDoubt", "Json",
    "Limits", "Mark", "Offsets", "Proof", "Receipt", "SinkName", "Uid", "handle_prefix",
)  # fmt: skip
_BASES = ("CommitterBase", "Dropped", "Operable", "Promises", "Recount", "SinkBase")
_SECRETS = ("EnvironmentSecret", "FileSecret", "HeldSecret", "Secret", "env", "file")

_HOMES = {
    **dict.fromkeys(_CONTRACT, "epochal.contract"),
    **dict.fromkeys(_ERRORS, "epochal.errors"),
    **dict.fromkeys(_TERMS, "epochal.terms"),
    **dict.fromkeys(_SECRETS, "epochal.kit.secrets"),
    **dict.fromkeys(_BASES, "epochal.kit.sink_base"),
    **dict.fromkeys(
        ("LedgerEntry", "StagedCommitter", "Transaction"), "epochal.kit.staged_committer"
    ),
}

__all__ = [
    "APPEND_ONLY",
    "Ability",
    "Backpressure",
    "Begin",
    "Claim",
    "Committer",
    "CommitterBase",
    "Deadline",
    "Dropped",
    "EngineWrite",
    "EngineWrites",
    "EngineWritten",
    "EnvironmentSecret",
    "EpochNumber",
    "EpochalError",
    "Fenced",
    "FileSecret",
    "Fingerprint",
    "Handle",
    "HeldSecret",
    "Identity",
    "InDoubt",
    "InvariantBroken",
    "Json",
    "LedgerEntry",
    "Limits",
    "Mark",
    "Misconfigured",
    "Offsets",
    "Operable",
    "OutcomeUnknown",
    "PreparedLost",
    "Promises",
    "Proof",
    "Receipt",
    "Recount",
    "Refused",
    "RowRejected",
    "Secret",
    "Select",
    "Sink",
    "SinkBase",
    "SinkName",
    "StagedCommitter",
    "Task",
    "Transaction",
    "TryAgain",
    "Uid",
    "WentBack",
    "Writer",
    "copy_at_work",
    "env",
    "file",
    "handle_prefix",
    "require_still_committed",
]


if not TYPE_CHECKING:  # a type checker that sees it takes every name for a public one

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
