"""Running tasks whose worker is gone, reset by a person."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock.keys import reserved
from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.tasks.states import TaskStatus
from tests.db.admin.visits import make
from tests.db.store.workers import NUMBER, register
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_stuck_returns_the_tasks_that_reset_stuck_resets(claim, slow_beats):
    living = uuid4()
    register(living)
    for _ in range(2):
        tasks.nothing.enqueue()
    claim(worker=living)
    [orphan] = claim()
    for status in set(TaskStatus.values) - {"RUNNING"}:
        make(status)
    assert [row.pk for row in Task.objects.all().stuck()] == [orphan.id]
    assert Task.objects.all().reset_stuck() == 1
    assert Task.objects.filter(status="RUNNING").count() == 1
    assert Task.objects.get(pk=orphan.id).status == "READY"
    assert Task.objects.values("status").distinct().count() == len(TaskStatus.values), "the others are as before"


def test_a_task_whose_worker_cannot_beat_but_has_a_session_that_works_is_not_stuck(claim, settings, eventually):
    """A person has locked the row of the worker for longer than the limit."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    register(worker := uuid4(), silent_for=600.0)
    tasks.nothing.enqueue()
    claim(worker=worker)
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(%s, %s)", (reserved.WORKER, NUMBER))
        assert not Task.objects.all().stuck().exists()
    finally:
        session.close()
    eventually(lambda: Task.objects.all().stuck().count() == 1)
