"""Pruning concurrent with transactions that begin to wait for a task."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.call import Call
from django_pglock.store.insert_tasks import insert_calls
from django_pglock.store.prune import ages_of, delete_free, outdated
from django_pglock.store.release import release
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

LONG_AGO = Now() - timedelta(days=1000)


def test_prune_keeps_a_task_that_gets_a_dependent_meanwhile(in_threads, eventually):
    """The waiter is committed after the snapshot of the statement that locks, and before it locks. Its process is slow
    to look whether the task has ended."""
    old = Task.objects.create(
        status="SUCCESSFUL", task_path=tasks.nothing.module_path, enqueued_at=LONG_AGO, finished_at=LONG_AGO
    )
    sleeping = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')"

    def is_sleeping():
        with connection.cursor() as cursor:
            cursor.execute(sleeping)
            return cursor.fetchone() == (True,)

    def work(number):
        if number == 0:
            # Evaluated once, before the first row is read.
            slow = Task.objects.filter(RawSQL("(SELECT pg_sleep(1.5)::text = '')", (), output_field=BooleanField()))
            return delete_free(outdated(slow, ages_of()))
        eventually(is_sleeping)
        with transaction.atomic():
            # As if the process were killed right after its commit, so that nothing is released.
            [waiting] = insert_calls("default", tasks.nothing.using(after=old.pk), [Call("[]", "{}")], "{}")
        return waiting.id

    deleted, waiting = in_threads(work, 2)
    assert deleted == 0
    release("default", [old.pk])
    assert Task.objects.get(pk=waiting).status == "READY", "not cancelled"
    assert Task.objects.prune() == 1
