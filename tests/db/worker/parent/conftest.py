"""What the tests of the parent may use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection

from django_pglock.worker.loop import Loop
from tests.conftest import NEVER


class RunningLoop(Loop):
    """A loop that the test runs until something is true."""

    def until(self, is_true: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + NEVER
        while not (value := is_true()):
            assert time.monotonic() < deadline, "it never came true"
            self.run_once()
        return value


@pytest.fixture
def loop(monkeypatch) -> Iterator[RunningLoop]:
    # A condition may become true without an event.
    monkeypatch.setattr("django_pglock.worker.loop.LONGEST_WAIT", 0.02)
    made = RunningLoop()
    yield made
    made.close()


def fetch(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, values or None)
        return cursor.fetchall() if cursor.description else []


def sessions(name: str) -> list[int]:
    """Return the process numbers of the server for the sessions with this name."""
    found = fetch(
        "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND datname = current_database()",
        f"lockworker {name}",
    )
    return [pid for (pid,) in found]


def terminate(name: str) -> None:
    for pid in sessions(name):
        fetch("SELECT pg_terminate_backend(%s)", pid)


@pytest.fixture
def probed(worker):
    return lambda **options: worker(probe_port="127.0.0.1:0", **options)
