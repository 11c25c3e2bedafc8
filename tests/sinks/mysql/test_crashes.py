"""Crashes at every call; the judge objects to code that is broken on purpose."""

import pytest
from kit.sql.crashes import *  # noqa: F403  every test there is one of this module, too

pytestmark = pytest.mark.products("mariadb", "mysql")
