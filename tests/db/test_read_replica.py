"""Verbs of ``Task.objects``, ``Schedule.objects`` and ``Queue.objects`` while a router sends reads to a replica.

A replica refuses writes and may be late. This one does not exist, so each statement that is sent to it is an error.
"""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Queue, Schedule, Task
from tests.db.store.schedules import HOUR, schedule
from tests.db.store.test_marking import Replica
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def reads_elsewhere(settings):
    settings.DATABASE_ROUTERS = [Replica()]


def fail(rows):
    rows.update(status="FAILED", started_at=Now(), finished_at=Now())


def cancel(rows):
    rows.update(status="CANCELLED", finished_at=Now())


def schedule_later(rows):
    rows.update(status="SCHEDULED", run_after=Now() + timedelta(days=1))


def claim_by_a_dead_worker(rows):
    rows.update(status="RUNNING", worker=uuid4(), attempts=1, started_at=Now(), last_attempted_at=Now())


@pytest.mark.parametrize(
    ("verb", "prepare", "after"),
    [
        (lambda rows: rows.cancel(), None, ["CANCELLED"]),
        (lambda rows: rows.retry(), fail, ["READY"]),
        (lambda rows: rows.discard(), fail, ["CANCELLED"]),
        (lambda rows: rows.run_now(), schedule_later, ["READY"]),
        (lambda rows: rows.reset_stuck(), claim_by_a_dead_worker, ["READY"]),
        (lambda rows: rows.stuck().reset_stuck(), claim_by_a_dead_worker, ["READY"]),
        (lambda rows: rows.move_to_queue("mail"), None, ["READY"]),
        (lambda rows: rows.delete_finished(), cancel, []),
        (lambda rows: rows.prune(older_than=0), cancel, []),
    ],
    ids=["cancel", "retry", "discard", "run_now", "reset_stuck", "of stuck", "move", "delete_finished", "prune"],
)
def test_a_verb_works_in_the_database_for_writes(verb, prepare, after, reads_elsewhere):
    tasks.nothing.enqueue()
    if prepare:
        prepare(Task.objects.using("default"))
    assert verb(Task.objects.all()) == 1
    assert list(Task.objects.using("default").values_list("status", flat=True)) == after


def test_a_cancel_reaches_the_tasks_that_wait_for_the_cancelled_one(reads_elsewhere):
    first = tasks.nothing.enqueue()
    child = tasks.nothing.using(after=[first]).enqueue()
    assert Task.objects.filter(pk=first.id).cancel() == 1
    assert Task.objects.using("default").get(pk=child.id).status == "CANCELLED"


def test_queues_are_paused_in_the_database_for_writes(reads_elsewhere):
    assert Queue.objects.pause("default")
    assert Queue.objects.using("default").get().paused_at is not None
    assert Queue.objects.resume("default")
    assert Queue.objects.using("default").get().paused_at is None


def test_schedules_are_changed_in_the_database_for_writes(own_registry, settings):
    schedule(due=5.5 * HOUR)
    settings.DATABASE_ROUTERS = [Replica()]
    assert Schedule.objects.all().disable() == 1
    assert Schedule.objects.all().enable() == 1
    assert [Schedule.objects.all().run_now()] == [list(Task.objects.using("default").values_list("pk", flat=True))]
