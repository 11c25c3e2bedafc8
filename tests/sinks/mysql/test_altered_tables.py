"""Columns that are altered between two epochs, under a task, and before rows are applied."""

import pytest
from kit.sql.altered_tables import *  # noqa: F403  every test there is one of this module, too

pytestmark = pytest.mark.products("mariadb", "mysql")
