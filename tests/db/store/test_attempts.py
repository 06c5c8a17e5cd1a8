"""The failed and lost attempts of a task."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Attempt, Task
from django_pglock.store.attempts import attempts_before, last_ended_by
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db


def fail(row, number, **fields):
    known = {"worker": uuid4(), "worker_name": "w", "started_at": Now(), "finished_at": Now(), "outcome": "FAILED"}
    texts = {"exception_path": "builtins.ValueError", "traceback": f"Traceback {number}", "log": "a\nb"}
    return Attempt.objects.create(task=row, number=number, **{**known, **texts, **fields})


def test_attempts_of_a_task_are_returned_in_their_order():
    row, other = make("READY"), make("READY")
    fail(row, 2), fail(row, 1), fail(other, 1)
    assert [each.number for each in attempts_before("default", row.pk)] == [1, 2]
    assert attempts_before("default", 10**12) == []


def test_tasks_are_found_by_the_exception_of_their_last_attempt():
    """Claims that were given back or snoozed have no attempt, so their number is not that of the last attempt."""
    last, given_back, earlier, other = (
        make("FAILED", attempts=2),
        make("FAILED", attempts=5, uncounted=3),
        make("FAILED", attempts=2),
        make("FAILED", attempts=1),
    )
    for row in (last, given_back):
        fail(row, 1), fail(row, 2, exception_path="a.Refused")
    fail(earlier, 1, exception_path="a.Refused"), fail(earlier, 2), fail(other, 1)
    make("FAILED", attempts=1)
    assert set(last_ended_by(Task.objects.all(), "a.Refused")) == {last, given_back}
    assert set(last_ended_by(Task.objects.filter(pk=last.pk), "a.Refused")) == {last}
    assert not last_ended_by(Task.objects.all(), "a.Refuse").exists()
