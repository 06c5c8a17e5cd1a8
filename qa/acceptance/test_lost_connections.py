"""Connections to the database are lost and opened again; the worker continues."""

from __future__ import annotations

import pytest

from django_pglock.models import Attempt, Task
from django_pglock.store import rescue
from tests.sample import session_tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_a_task_that_ends_its_own_session_again_and_again_ends_failed(worker, eventually, monkeypatch):
    """Before, it ran forever. The other sessions of the worker live, so there is no outage."""
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    worker(threads=2)
    session_tasks.end_own_session.enqueue(99)
    row = eventually(lambda: Task.objects.filter(finished_at__isnull=False).first())
    assert (row.status, row.retries, row.rescues) == ("FAILED", 0, 3)
    assert 4 <= row.attempts <= 10
    *lost, last = Attempt.objects.order_by("number")
    assert ({each.outcome for each in lost}, last.outcome) == ({"LOST"}, "FAILED")
    assert "MAX_RESCUES" in last.traceback
    assert not Effect.objects.exists()
