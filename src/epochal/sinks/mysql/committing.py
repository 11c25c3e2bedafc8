"""Puts a committer together, for the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochal.contract import Committer, Limits
from epochal.errors import Misconfigured
from epochal.kit.sql.prepared import PreparedCommitter
from epochal.kit.sql.staged import StagedCommitter
from epochal.sinks.mysql.checking import MySQLChecker
from epochal.sinks.mysql.dialect import DIALECT
from epochal.terms import Identity

try:
    from epochal.sinks.mysql.pool import MySQLPool
except ImportError as error:
    raise Misconfigured(
        f"the MySQL sink needs a package that is not installed: {error.name}",
        "pip install 'epochal[mysql]'",
    ) from error

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL


def committer(sink: MySQL, identity: Identity, limits: Limits) -> Committer:
    kind = StagedCommitter if sink.strategy == "staged" else PreparedCommitter
    return kind(
        sink=sink,
        identity=identity,
        limits=limits,
        dialect=DIALECT,
        pool=MySQLPool(sink.server, identity),
        checker=MySQLChecker(sink, identity),
    )
