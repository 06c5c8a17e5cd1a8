"""What the tests of the parent may use."""

from __future__ import annotations

import pytest

from tests.sql import execute_sql


def sessions(name: str) -> list[int]:
    """Return the process numbers of the server for the sessions with this name."""
    of_part = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()"
    return [pid for (pid,) in execute_sql(of_part, [f"lockworker {name}"])]


def terminate(name: str) -> None:
    for pid in sessions(name):
        execute_sql("SELECT pg_terminate_backend(%s)", [pid])


@pytest.fixture
def probed(worker):
    return lambda **options: worker(probe_port="127.0.0.1:0", **options)
