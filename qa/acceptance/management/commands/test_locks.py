"""``manage.py locks`` in a pipe."""

from __future__ import annotations

import pytest

from qa.acceptance.management.commands.processes import manage
from tests.conftest import NEVER

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_the_command_ends_quietly_when_its_reader_closes_the_pipe():
    """As in "locks --watch | head -1", which ends with its first line, and not with a traceback."""
    with manage("locks", "--watch", "0.1") as process:
        assert "No advisory lock" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(NEVER) == 0
