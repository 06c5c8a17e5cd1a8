"""Deadlines for the statements of services: counted in checks, and not in seconds."""

from __future__ import annotations

import time

import pytest

from django_pglock.worker.liveness import session_watch
from django_pglock.worker.liveness.session_watch import _Awaited


class Waits:
    """A service that waits for the answer to its statement of this number."""

    name, statement_timeout, number = "service", 3.0, 1

    def statement_in_progress(self):
        return ("session", self.number)


@pytest.fixture
def shut_down(monkeypatch):
    shut_down = []
    monkeypatch.setattr(session_watch, "shut_down_socket", shut_down.append)
    return shut_down


def test_a_session_is_closed_after_a_number_of_checks_and_not_after_a_time(shut_down, monkeypatch):
    """A process that was stopped for an hour has made only one check since then."""
    seen, clock = _Awaited(Waits()), iter(range(0, 10**6, 3600))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for _ in range(6):
        seen.check()
    assert shut_down == []
    seen.check()
    assert shut_down == ["session"]


def test_the_session_of_a_service_with_new_answers_is_not_closed(shut_down):
    busy = Waits()
    seen = _Awaited(busy)
    for busy.number in range(100):
        seen.check()
    assert shut_down == []
