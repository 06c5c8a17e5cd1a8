"""Known failures of other queues that no other test covers. docs/evidence/failures.md has the list."""

from __future__ import annotations

import itertools
import math
import time
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import conf, task
from django_pglock.models import Attempt, Schedule, Task, Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import wake as wakeup
from django_pglock.store.rescue import rescue
from django_pglock.store.wake import write_sleep_flag
from tests.db.store.workers import beat
from tests.sample import keyed_tasks as keyed
from tests.sample import running_tasks, scheduled, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "tests.sample.tasks.nothing"


def beat_of(worker, **options):
    """Write a worker's row, as its heartbeat does."""
    same = {"name": "pod-1", "hostname": "pod-1", "pid": 7, "queues": [], "threads": 1, "is_stopping": False}
    return beat("default", worker, **{**same, **options})


def ask(sql, *values):
    return execute_sql(sql, values or None)


# Claiming


def test_a_task_may_run_for_longer_than_any_limit(claim, slow_beats):
    """It began ten days ago, and its worker sends heartbeats."""
    worker = uuid4()
    beat_of(worker)
    tasks.nothing.enqueue()
    claim(worker=worker)
    long_ago = Now() - timedelta(days=10)
    Task.objects.update(enqueued_at=long_ago, started_at=long_ago, last_attempted_at=long_ago)
    assert rescue("default", unbroken=math.inf) == []
    assert not Task.objects.all().stuck().exists()


def test_a_new_worker_of_the_same_name_does_not_keep_its_dead_predecessor_alive(claim):
    """The same host, and the same process number, as in any container."""
    before, after = uuid4(), uuid4()
    beat_of(before)
    tasks.nothing.enqueue()
    claim(worker=before)
    Worker.objects.filter(pk=before).update(heartbeat_at=Now() - timedelta(days=1))
    beat_of(after)
    assert [each.worker for each in rescue("default", unbroken=math.inf)] == [before]


def test_tasks_of_living_workers_do_not_count_for_the_limit_of_rescue(claim, slow_beats):
    living = uuid4()
    beat_of(living)
    for _ in range(6):
        tasks.nothing.enqueue()
    claim(5, worker=living)
    [orphan] = claim()
    assert [each.id for each in rescue("default", unbroken=math.inf, limit=1)] == [orphan.id]


@pytest.fixture
def high_ids():
    """Let the ids of tasks begin far above 32 bits, and at one again after the test."""
    count_from = "SELECT setval(pg_get_serial_sequence('django_pglock_task', 'id'), %s, false)"
    ask(count_from, 2**40)
    yield 2**40
    Task.objects.all().delete()
    ask(count_from, 1)


def test_tasks_with_ids_beyond_32_bits_run_and_end(high_ids, worker, eventually):
    """Through claims, successes, failures, retries, keys, waiters, progress and pruning."""
    running = worker(threads=2)
    awaited = tasks.echo.enqueue(1)
    tasks.fail_twice.enqueue("retried")
    tasks.fail.enqueue()
    keyed.step.enqueue(1)
    keyed.step.using(after=[awaited]).enqueue(1)
    running_tasks.tell.enqueue(1)
    eventually(lambda: Task.objects.filter(finished_at__isnull=False).count() == 6)
    assert running.shutdown()
    assert min(Task.objects.values_list("pk", flat=True)) == high_ids
    assert Task.objects.filter(status="FAILED").count() == 1
    assert Attempt.objects.count() == 3
    assert Task.objects.all().prune(older_than=0, statuses=["SUCCESSFUL"]) == 5


def test_a_beat_is_one_statement_and_writes_no_task(claim):
    """If a heartbeat wrote each running task, its cost would grow with the number of running tasks."""
    worker = uuid4()
    beat_of(worker)
    for _ in range(50):
        tasks.nothing.enqueue()
    claim(50, worker=worker)
    versions = ask("SELECT id, xmin::text FROM django_pglock_task ORDER BY id")
    beat_at = Worker.objects.get().heartbeat_at
    with CaptureQueriesContext(connection) as queries:
        beat_of(worker)
    assert len(queries) == 1
    assert Worker.objects.get().heartbeat_at > beat_at
    assert ask("SELECT id, xmin::text FROM django_pglock_task ORDER BY id") == versions


# Waking


def test_a_task_without_a_notification_is_found_by_the_poll(worker, eventually):
    """As when the LISTEN session is half open: the worker sleeps, and this row comes without a notification."""
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    time.sleep(wakeup.NEGATIVE_TTL * 3)  # its second poll is over: now it waits for a notification
    row = Task.objects.create(queue="default", backend="default", task_path=PATH)
    eventually(lambda: Task.objects.filter(pk=row.pk, status="SUCCESSFUL").exists())


@pytest.fixture
def notified():
    """Listen as the parent of this worker does; return the queue of each received payload, and its count."""
    listener, worker = dedicated_connection("default"), uuid4()
    channel = wakeup.channel_of(worker)
    beat_of(worker)
    write_sleep_flag("default", worker, is_sleeping=True)
    with listener.cursor() as cursor:
        cursor.execute(f"LISTEN {channel}")

    def read():
        # Notifications come in the order of their commits: before this one, all that there were.
        ask("SELECT pg_notify(%s, 'the end')", channel)
        payloads = itertools.takewhile(
            lambda payload: payload != "the end", (note.payload for note in listener.connection.notifies(timeout=60))
        )
        return [payload.removeprefix(f"{worker} 0 ") for payload in payloads]

    yield read
    listener.close()


@pytest.mark.parametrize(("is_sleeping", "expected"), [(False, []), (True, ["default", "mail"])])
def test_an_enqueue_notifies_only_sleeping_workers_and_once(notified, is_sleeping, expected):
    """Each NOTIFY takes a lock that serialises the commits of the whole server."""
    Worker.objects.update(is_sleeping=is_sleeping)
    wakeup._no_worker_slept_at.clear()
    with transaction.atomic():
        for number in range(100):
            tasks.nothing.using(queue_name=("default", "mail")[number % 2]).enqueue()
    assert sorted(notified()) == expected


def test_one_message_notifies_hundreds_of_queues(notified):
    """A retry of all failed tasks adds to each queue. One message for each queue would be one commit each."""
    wakeup._no_worker_slept_at.clear()
    names = [f"queue {number} 100%" for number in range(200)]
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        wakeup.wake("default", names)
    assert len([each for each in queries if "pg_notify" in each["sql"]]) == 1
    assert notified() == sorted(names)


def test_a_rollback_sends_no_notification(notified):
    for is_undone in (True, False):
        with transaction.atomic():
            tasks.nothing.using(queue_name="outer").enqueue()
            with transaction.atomic():
                tasks.nothing.using(queue_name="inner").enqueue()
                transaction.set_rollback(True)
            tasks.nothing.using(queue_name="inner").enqueue()
            transaction.set_rollback(is_undone)
    assert sorted(notified()) == ["inner", "outer"]


# Keys


def test_a_rescue_does_not_conflict_with_a_waiting_task(claim):
    """A task of a dead worker and a waiting task have the same unique key. A page of rescue must not fail for that."""
    keyed.refresh.enqueue(1)
    claim()
    keyed.refresh.enqueue(1)
    tasks.nothing.enqueue()
    [orphan] = Task.objects.filter(status="RUNNING")
    assert [each.id for each in rescue("default", unbroken=math.inf)] == [orphan.pk]
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


# Scheduling


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("hours", [-24, 24])
def test_the_clock_of_the_host_does_not_matter(worker, eventually, monkeypatch, hours):
    """The clock of a worker is a day late or early. No task begins too soon, and no living worker counts as dead."""
    monkeypatch.setattr(conf, "BEATS_TO_THE_LIMIT", 1200)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + hours * 3600)
    monkeypatch.setattr("django.utils.timezone.now", lambda: pytest.fail("somebody asked the host for the time"))
    task(every=3600)(scheduled.nightly)
    living = uuid4()
    beat_of(living)
    worker()
    later = tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    tasks.fail_with_long_wait.enqueue()
    soon = tasks.nothing.using(run_after=timedelta(seconds=0.3)).enqueue()
    eventually(lambda: Task.objects.filter(pk=soon.id, status="SUCCESSFUL").exists())
    eventually(lambda: Task.objects.filter(task_path__endswith="long_wait", status="SCHEDULED").exists())
    eventually(lambda: Schedule.objects.exists())
    assert Task.objects.get(pk=later.id).status == "SCHEDULED"
    assert not Effect.objects.filter(name="nightly").exists()
    [(most,)] = ask(
        """SELECT max(abs(EXTRACT(EPOCH FROM date - clock_timestamp()))) FROM django_pglock_task,
           unnest(ARRAY[enqueued_at, started_at, last_attempted_at, finished_at]) AS date"""
    )
    assert most < 3600
    assert Worker.objects.alive().count() == 2


# Speed


def test_no_transaction_is_open_while_a_task_runs(worker, eventually):
    """A transaction that stays open while a task runs would keep each dead row of the database."""
    worker()
    running_tasks.ask.enqueue()
    eventually(lambda: Effect.objects.exists())
    open_ = """SELECT application_name, state, query FROM pg_stat_activity
               WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"""
    try:
        # The server ends what a service leaves open, after thirty seconds.
        eventually(lambda: not ask(open_), seconds=25, why="a transaction stays open")
        assert Task.objects.get().status == "RUNNING"
    finally:
        Task.objects.cancel()
    eventually(lambda: Task.objects.get().status == "CANCELLED")


def test_the_table_is_vacuumed_early():
    [(options,)] = ask("SELECT reloptions FROM pg_class WHERE oid = 'django_pglock_task'::regclass")
    settings = dict(each.split("=") for each in options)
    assert float(settings["autovacuum_vacuum_scale_factor"]) <= 0.01
    assert int(settings["fillfactor"]) < 100


def test_no_index_of_claims_has_entries_of_successful_tasks():
    """A million finished rows must not enlarge the index that claims read."""
    indexes = dict(ask("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = 'django_pglock_task'"))
    whole = {name for name, definition in indexes.items() if " WHERE " not in definition}
    assert whole == {"django_pglock_task_pkey"}
    assert len(indexes) == 11, "each one costs each claim that it has the task of"
    tasks.nothing.enqueue()
    Task.objects.update(status="SUCCESSFUL", finished_at=Now())
    for name in sorted(set(indexes) - whole):
        condition = indexes[name].partition(" WHERE ")[2]
        assert ask(f"SELECT count(*) FROM django_pglock_task WHERE {condition}") == [(0,)], name
