"""The one import place for sinks: complete, typed, and light."""

import subprocess
import sys

import pytest

from epochal import kit

DRIVERS = {"boto3", "deltalake", "obstore", "oracledb", "psycopg", "pyiceberg", "pymysql"}


@pytest.mark.parametrize("name", kit.__all__)
def test_every_name_can_be_imported(name):
    assert getattr(kit, name) is not None
    assert name in dir(kit)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="StagedComitter"):
        _ = kit.StagedComitter


def test_importing_the_kit_and_its_bases_loads_no_driver():
    program = (
        "import sys\n"
        "from epochal.kit import CommitterBase, Receipt, SinkBase, StagedCommitter, TryAgain\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not DRIVERS & {name.partition(".")[0] for name in done.stdout.split()}
