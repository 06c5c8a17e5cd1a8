"""Rows that the constraints of the table refuse, and how wide its columns are."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_pglock.error_reading import MAX_PATH
from django_pglock.models import Attempt, Queue, RateLimit, Schedule, Task
from django_pglock.store.ready import LONGEST_BY
from django_pglock.tasks.call_keys import LONGEST_KEY
from django_pglock.tasks.queues import LONGEST_QUEUE
from django_pglock.tasks.schedules import LONGEST_EXPRESSION
from django_pglock.tasks.states import FINISHED, TaskStatus

pytestmark = pytest.mark.django_db

CALL = {"queue": "default", "backend": "default", "task_path": "x"}
NOW = timezone.now()
#: The columns that a row of each status needs.
NEEDS = {
    "READY": {},
    "RUNNING": {"worker": uuid4(), "last_attempted_at": NOW},
    "SCHEDULED": {"run_after": NOW},
    "BLOCKED": {"lock_key": "a"},
    **{status: {"finished_at": NOW} for status in FINISHED},
}


def refused(**values):
    with pytest.raises(IntegrityError, match="pglock_task"), transaction.atomic():
        Task.objects.create(**CALL, **values)
    return True


@pytest.mark.parametrize("status", TaskStatus.values)
def test_a_row_has_what_its_status_needs(status):
    needs = NEEDS[status]
    row = Task.objects.create(**CALL, status=status, **needs)
    row.validate_constraints()
    for name in needs:
        assert refused(status=status, **{other: value for other, value in needs.items() if other != name})
    if status not in FINISHED:
        assert refused(status=status, **needs, finished_at=NOW)


def test_a_blocked_row_may_wait_for_other_tasks_instead_of_a_key():
    assert Task.objects.create(**CALL, status="BLOCKED", waits_for=1).pk


def test_the_database_refuses_values_that_no_task_can_have():
    for values in (
        *({"status": "WAITING"}, {"priority": 101}, {"unique_key": "a"}, {"concurrency": 0}, {"fair_key": ""}),
        *({"attempts": -1}, {"uncounted": -1}, {"attempts": 1, "uncounted": 2}),
    ):
        assert refused(**values), values


@pytest.mark.parametrize(
    ("model", "name", "longest"),
    [
        *((Task, name, LONGEST_KEY) for name in ("lock_key", "group_key", "fair_key", "unique_key")),
        (RateLimit, "key", LONGEST_KEY),
        (Attempt, "exception_path", MAX_PATH),
        (Task, "queue", LONGEST_QUEUE),
        (Queue, "name", LONGEST_QUEUE),
        (Queue, "paused_by", LONGEST_BY),
        (Schedule, "expression", LONGEST_EXPRESSION),
    ],
)
def test_a_column_is_as_wide_as_the_code_expects(model, name, longest):
    """The database refuses a longer text. For an outcome, this error would come after the function has run."""
    assert model._meta.get_field(name).max_length == longest
