"""Claiming: in order, and only functions that the worker knows."""

from __future__ import annotations

import time
from datetime import timedelta
from operator import itemgetter
from uuid import uuid4

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Queue, Task
from django_pglock.store import ready as pause_module
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.outcome import Succeeded
from django_pglock.store.ready import pause
from django_pglock.store.settle import settle
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.queues import OWN_QUEUE
from tests.db.store import fair_claims
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def settle_one(claim, outcome):
    return settle("default", [(claim, outcome)], claim.worker)


def test_only_known_functions_are_claimed():
    """A rolling deploy must not burn an attempt on a task from the future."""
    tasks.nothing.enqueue()
    Task.objects.create(queue="default", backend="default", task_path="shop.tasks.not_deployed_yet")
    statement = claim_statement("default", worker=uuid4(), paths=["tests.sample.tasks.nothing"])
    assert len(statement.execute(10, "default")) == 1
    assert Task.objects.get(task_path="shop.tasks.not_deployed_yet").attempts == 0


def test_only_tasks_of_the_queue_and_of_the_backend_are_claimed():
    """Two workers with different settings share the table."""
    for queue, backend in (("default", "default"), ("mail", "default"), ("default", "other")):
        Task.objects.create(queue=queue, backend=backend, task_path="tests.sample.tasks.nothing")
    worker, paths = uuid4(), ["tests.sample.tasks.nothing"]
    of_backend = claim_statement("default", worker=worker, paths=paths, backend="other")
    of_any = claim_statement("default", worker=worker, paths=paths)
    assert [len(each.execute(10, queue)) for each, queue in ((of_backend, "mail"), (of_backend, "default"))] == [0, 1]
    assert len(of_any.execute(10, "default")) == 1
    assert Task.objects.get(status="READY").queue == "mail"


def test_the_own_tasks_of_the_package_are_claimed_for_each_backend_of_the_project_and_for_no_other():
    """Two projects may share the table. The backend of the one does not exist in the other."""
    for backend in ("default", "of another project"):
        Task.objects.create(queue=OWN_QUEUE, backend=backend, task_path="tests.sample.tasks.nothing")
    statement = claim_statement("default", worker=uuid4(), paths=["tests.sample.tasks.nothing"], backend="second")
    assert len(statement.execute(10, OWN_QUEUE)) == 1
    assert Task.objects.get(status="READY").backend == "of another project"


def test_tasks_of_a_paused_queue_and_fair_tasks_are_not_claimed():
    """Another statement claims fair tasks."""
    tasks.nothing.enqueue()
    Task.objects.create(queue="default", backend="default", task_path="tests.sample.tasks.nothing", fair_key="shop")
    pause("default", "mail")
    statement = claim_statement("default", worker=uuid4(), paths=["tests.sample.tasks.nothing"])
    assert len(statement.execute(10, "default")) == 1
    tasks.nothing.enqueue()
    pause("default", "default")
    assert statement.execute(10, "default") == []


def test_claims_run_in_the_order_of_priority_and_id_whatever_the_order_of_the_answer(claim):
    ids = [int(tasks.nothing.using(priority=priority).enqueue().id) for priority in (0, 5, 0, 5)]
    worker = uuid4()
    rows = claim_statement("default", worker=worker, paths=["tests.sample.tasks.nothing"]).execute(10, "default")
    rows = sorted(rows, key=itemgetter(0), reverse=True)
    assert [each.id for each in claims_of(rows, worker)] == [ids[1], ids[3], ids[0], ids[2]]


def test_a_claim_behind_a_task_takes_later_tasks_of_its_priority():
    ids = [int(tasks.nothing.using(priority=priority).enqueue().id) for priority in (0, 0, 1, 0)]
    statement = claim_statement("default", worker=uuid4(), paths=["tests.sample.tasks.nothing"], behind=True)
    # The plan decides the order of the returned rows. The caller sorts them.
    assert sorted(row[0] for row in statement.execute(10, "default", 0, ids[0])) == [ids[1], ids[3]]


@pytest.mark.parametrize("date", ["infinity", "-infinity", "294276-12-31", "4713-01-01 BC"])
def test_no_date_of_a_row_keeps_tasks_from_being_claimed(claim, date):
    """Another program may have written the date."""
    tasks.nothing.enqueue()
    execute_sql("UPDATE django_pglock_task SET enqueued_at = %s, started_at = %s", [date] * 2)
    [mine] = claim()
    assert mine.waited >= 0


@pytest.mark.parametrize("attempt", [1, 2])
def test_dates_of_a_claim_are_those_of_the_row_to_the_microsecond(claim, attempt):
    tasks.nothing.using(run_after=timedelta(seconds=0)).enqueue()
    for _ in range(attempt):
        Task.objects.update(status="READY")
        [mine] = claim()
    row = Task.objects.get()
    names = ("run_after", "enqueued_at", "started_at", "last_attempted_at")
    assert {name: mine.date(name) for name in names} == {name: getattr(row, name) for name in names}
    accepted = settle_one(mine, Succeeded())
    assert date_of(accepted[mine.id]) == Task.objects.get().finished_at


# A paused queue is not claimed from.


def test_a_paused_queue_is_not_claimed_from_and_costs_one_probe():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    enqueue_many(tasks.nothing, [{}] * 3)
    Queue.objects.pause("default", by="me", reason="the bank is closed")
    assert Queue.objects.get().paused_by == "me"
    assert fair_claims.claims_of().claim(10) == []
    assert not Queue.objects.pause("default")
    Queue.objects.pause("other", by="x" * 300)
    assert Queue.objects.resume("default")
    assert len(fair_claims.claims_of().claim(10)) == 6
    # The row of the other queue is unchanged, because the name was too long for the column.
    [other] = Queue.objects.filter(paused_at__isnull=False)
    assert (other.name, other.paused_by) == ("other", "x" * 255)
    assert Queue.objects.get(name="default").paused_by == ""


def test_only_the_named_queue_is_paused_and_resumed(monkeypatch):
    woken = []
    monkeypatch.setattr(pause_module, "wake", lambda using, queues: woken.extend(queues))
    Queue.objects.create(name="other")
    assert Queue.objects.pause("mail", reason="closed")
    assert [*pause_module.paused_queues("default")] == ["mail"]
    Queue.objects.pause("other", by="x" * 255)
    assert Queue.objects.get(name="other").paused_by == "x" * 255, "as many as the column takes"
    assert Queue.objects.resume("mail")
    assert woken == ["mail"]
    assert not Queue.objects.resume("mail")
    assert woken == ["mail"]
    assert Queue.objects.get(name="mail").reason == ""
    assert [*pause_module.paused_queues("default")] == ["other"]


@pytest.mark.parametrize("change", [Queue.objects.pause, Queue.objects.resume])
def test_a_name_that_no_queue_has_or_can_have_is_refused(change):
    with pytest.raises(ValueError, match="must have 1 to 128 characters"):
        change("")
    with pytest.raises(ValueError, match=r"'mail\*' is no queue. Only runlockworker reads PREFIX"):
        change("mail*")
    with pytest.raises(ValueError, match="The reason contains a NUL"):
        Queue.objects.pause("mail", reason="\x00")
    assert not Queue.objects.filter(name="mail").exists()


def test_a_worker_follows_a_pause_and_a_resume_without_a_poll(worker, eventually, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}

    worker()
    Queue.objects.pause("default")
    result = tasks.echo.enqueue(1)
    time.sleep(0.3)
    assert Task.objects.get(pk=result.id).status == "READY"
    Queue.objects.resume("default")
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
