"""A redrive retries the tasks of a group in the order of their ids, each once, and knows how far it has come."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock.errors import ClaimLost
from django_pglock.models import Task
from django_pglock.store import bulk
from django_pglock.store.bulk import Work, change_batch, next_ids
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db

#: After the first failures of the tests, and before their second failures.
LATER = timedelta(hours=1)


@pytest.fixture
def step():
    """Retry the next tasks as one running task does."""
    # Not the first id of the table, which a test gives to a failed task.
    own = make("RUNNING", attempts=1, pk=10**9)

    def step(limit=2, attempt=1):
        before = timezone.now() + LATER
        work = Work("retry", fingerprint=7)
        return change_batch("default", work, before=before, limit=limit, by=own.pk, attempt=attempt)[:2]

    step.own = own
    return step


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


def test_each_step_of_a_redrive_retries_a_batch_until_all_are_done(step):
    rows = [fail(fingerprint=7) for _ in range(5)]
    other, running = fail(fingerprint=8), make("RUNNING", attempts=1)
    assert step() == (2, False)
    assert statuses(rows) == ["READY"] * 2 + ["FAILED"] * 3
    assert step() == (4, False)
    assert step() == (5, True)
    assert statuses([*rows, other]) == ["READY"] * 5 + ["FAILED"]
    step.own.refresh_from_db()
    assert step.own.progress == {**step.own.progress, "done": 5, "total": 5, "position": rows[-1].pk}
    assert Task.objects.get(pk=running.pk).progress is None


def test_the_first_task_of_the_table_is_retried(step):
    first = fail(fingerprint=7, pk=1)
    assert step() == (1, True)
    assert statuses([first]) == ["READY"]


def test_a_redrive_does_not_retry_a_task_that_has_failed_again(step):
    """Otherwise a redrive of tasks that always fail would never end."""
    rows = [fail(fingerprint=7) for _ in range(3)]
    step()
    Task.objects.filter(pk=rows[0].pk).update(status="FAILED", finished_at=Now() + 2 * LATER, fingerprint=7)
    late = fail(fingerprint=7)
    Task.objects.filter(pk=late.pk).update(finished_at=Now() + 2 * LATER)
    assert step() == (3, True)
    assert statuses([*rows, late]) == ["FAILED", "READY", "READY", "FAILED"]


def test_a_redrive_does_not_retry_a_discarded_task(step, monkeypatch):
    rows = [fail(fingerprint=7) for _ in range(2)]

    def find(*values):
        ids, position = next_ids(*values)
        Task.objects.filter(pk=ids[0]).discard()
        return ids, position

    monkeypatch.setattr(bulk, "next_ids", find)
    assert step() == (1, False)
    assert statuses(rows) == ["CANCELLED", "READY"]


def test_a_worker_that_has_lost_the_claim_retries_nothing(step):
    rows = [fail(fingerprint=7)]
    with pytest.raises(ClaimLost):
        step(attempt=2)
    Task.objects.filter(pk=step.own.pk).update(status="READY")
    with pytest.raises(ClaimLost):
        step()
    assert statuses(rows) == ["FAILED"]


def test_tasks_that_cannot_be_retried_are_skipped(step):
    """The unique key belongs to another task. Without the skip, the redrive would read the same tasks forever."""
    make("READY", unique_key="taken", unique_scope="UNFINISHED")
    rows = [fail(fingerprint=7, unique_key="taken", unique_scope="UNFINISHED") for _ in range(2)]
    rows.append(fail(fingerprint=7))
    assert step() == (0, False)
    assert step() == (1, True)
    assert statuses(rows) == ["FAILED", "FAILED", "READY"]


def test_a_redrive_of_an_empty_group_ends_at_the_first_step(step):
    assert step() == (0, True)
