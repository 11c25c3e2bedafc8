"""Columns that are altered between two epochs, under a task, and before rows are applied."""

from kit.sql.altered_tables import *  # noqa: F403  every test there is one of this module, too
