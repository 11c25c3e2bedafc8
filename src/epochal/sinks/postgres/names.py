"""What PostgreSQL allows as a name. Nothing is folded to lower case: case is kept."""

from __future__ import annotations

from epochal.kit.sql.names import NameRule

NAMES = NameRule(database="PostgreSQL", length_max=63)
require_identifier = NAMES.require
