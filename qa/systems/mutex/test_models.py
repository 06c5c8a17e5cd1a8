"""The verbs of the mutex, one client at a time."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from example_project.systems.mutex import scenario as system
from example_project.systems.mutex.models import Status, TaskState

pytestmark = pytest.mark.django_db(transaction=True)


HOUR = timedelta(hours=1)


@pytest.fixture
def row():
    return TaskState.objects.create(queue="mail", name="index", retries_left=3)


def acquire(owner="anna", timeout=None):
    return TaskState.objects.acquire("mail", "index", owner, timeout)


def let_time_pass():
    """Let the time of all rows in their statuses be over."""
    TaskState.objects.update(expires_at=Now() - HOUR)


def test_only_the_owner_releases(row):
    ours = acquire("anna")
    assert ours.release()
    theirs = acquire("bert")
    assert not ours.release()
    assert TaskState.objects.get().owner == "bert"
    assert theirs.release()


def test_without_a_timeout_a_row_is_held_for_ever(row):
    acquire()
    TaskState.objects.all().move_stale()
    assert TaskState.objects.get().status == "in_progress"


def test_after_its_timeout_a_row_is_acquired_again_and_the_late_owner_finds_out(row):
    """The owner is the same on both sides, as with a program that was restarted: the token tells them apart."""
    late = acquire("anna", HOUR)
    assert acquire("anna", HOUR) is None
    let_time_pass()
    again = acquire("anna", HOUR)
    assert again.token == late.token + 1
    assert not late.release(Status.DONE)
    assert again.release(Status.DONE)


def test_the_clients_clock_is_not_asked(row, monkeypatch):
    monkeypatch.setattr(timezone, "now", lambda: pytest.fail("the client's clock was asked"))
    with CaptureQueriesContext(connection) as queries:
        ours = acquire("anna", HOUR)
    ours.release(Status.DONE, HOUR)
    assert "STATEMENT_TIMESTAMP() + " in queries[-1]["sql"]


# 32 clients in four processes, kills in between: the scenario of the mutex, whose claims all hold.


def test_the_mutex_system_loses_no_row_and_has_one_owner_of_each(harness, monkeypatch):
    monkeypatch.setattr(system, "THREADS", 8)
    monkeypatch.setattr(system, "ROWS", 200)
    system.run_scenario(harness)
    harness.judge()
