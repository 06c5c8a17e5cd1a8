"""Idle workers send heartbeats rarely while enough older workers send them often. A test makes the rows of these."""

from __future__ import annotations

import signal
import threading
import time
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now

from django_pglock.conf import Settings
from django_pglock.models import Task, Worker
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.liveness import LEAST_FREQUENT, LEAST_OTHERS, REST_INTERVALS
from tests.conftest import NEVER
from tests.sample import tasks
from tests.sample.models import Effect
from tests.settings import DJANGO_PGLOCK

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

INTERVAL, LIMIT = DJANGO_PGLOCK["HEARTBEAT_INTERVAL"], Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT
#: Ends the session that holds the lock of a worker.
END_SESSION = """
SELECT count(pg_terminate_backend(held.pid)) FROM django_pglock_worker AS worker
JOIN pg_locks AS held ON held.objid::bigint = worker.lock_key AND held.locktype = 'advisory' AND held.objsubid = 2
WHERE worker.id = %s
"""


@pytest.fixture
def beats(transactional_db):
    """Beat for the rows of older workers in a thread, until the event is set that this returns."""
    is_over = threading.Event()

    def beat():
        while not is_over.wait(INTERVAL / 5):
            Worker.objects.filter(name="older").update(heartbeat_at=Now())
        connection.close()

    thread = threading.Thread(target=beat)
    thread.start()
    yield is_over
    is_over.set()
    thread.join(NEVER)


@pytest.fixture
def older_workers(beats):
    """Rows of older workers that sleep and beat often."""
    ago = Now() - timedelta(days=1)
    row = {"hostname": "h", "pid": 1, "threads": 1, "is_sleeping": True, "started_at": ago}
    # A worker on any host may rest: they are on two.
    return [
        Worker.objects.create(
            id=uuid4(),
            name="older",
            queues=[],
            beating_since=ago,
            **{**row, "hostname": f"h{number}"},
        )
        for number in range(LEAST_FREQUENT + LEAST_OTHERS)
    ]


def rows():
    return Worker.objects.exclude(name="older")


def rests(row):
    """Return whether the interval before the last heartbeat was that of a resting worker."""
    late = {"beating_since__gte": F("heartbeat_at"), "beating_since__gt": F("started_at")}
    return rows().filter(pk=row.pk, **late).exists()


@pytest.fixture
def resting(worker_process, older_workers, eventually):
    """Start workers, and wait until they rest."""

    def start(count=1, **options):
        processes = [worker_process("--threads", "1", **options) for _ in range(count)]
        eventually(lambda: all(map(rests, rows())), why=processes[0].output)
        return processes

    return start


@pytest.fixture
def rescuer(worker):
    """A worker in this process that does the upkeep; it serves other queues, and it does not rest."""

    def start():
        Worker.objects.filter(name="older").update(is_stopping=True)
        return worker(queues=["none"])

    return start


def test_a_worker_that_rests_beats_rarely_and_takes_a_task_at_once(resting, eventually):
    resting()
    first = rows().get()
    seen = eventually(lambda: rows().filter(heartbeat_at__gt=first.heartbeat_at).first())
    assert seen.heartbeat_at - first.heartbeat_at > timedelta(seconds=(REST_INTERVALS - 1) * INTERVAL)
    for _ in range(3):
        result = tasks.nothing.enqueue()
        eventually(lambda result=result: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
        row, task = rows().get(), Task.objects.get(pk=result.id)
        assert row.heartbeat_at > task.started_at - timedelta(seconds=1.2 * INTERVAL), "it claims unheard"
        eventually(lambda row=row: rests(row), why="it does not rest again")


def test_a_busy_worker_does_not_rest(resting, eventually):
    resting()
    tasks.note_and_sleep.enqueue("busy", 4 * REST_INTERVALS * INTERVAL)
    eventually(lambda: Effect.objects.exists())
    eventually(lambda: not rests(rows().get()))
    since = rows().get().beating_since
    time.sleep(2 * REST_INTERVALS * INTERVAL)
    assert rows().get().beating_since == since, "a beat was late"
    eventually(lambda: rests(rows().get()), why="it does not rest again")


def test_a_resting_worker_that_is_cut_off_repeatedly_keeps_its_task(resting, rescuer, eventually):
    [process] = resting()
    rescuer()
    tasks.note_and_sleep.enqueue("once", 2 * LIMIT)
    eventually(lambda: Effect.objects.exists(), why=process.output)
    busy, cuts = Task.objects.get().worker, 0
    while Task.objects.get().status == "RUNNING":
        with connection.cursor() as cursor:
            cursor.execute(END_SESSION, [busy])
            cuts += cursor.fetchone()[0]
        time.sleep(0.3)
    assert cuts > 3
    row = Task.objects.get()
    assert (row.status, row.attempts, row.rescues) == ("SUCCESSFUL", 1, 0), process.output


def test_resting_workers_rescue_the_tasks_of_older_workers_that_died(older_workers, beats, resting, eventually):
    """The older workers are on one host. Their rows are not deleted."""
    tasks.nothing.using(queue_name="x").enqueue()
    path = tasks.nothing.module_path
    owner = older_workers[0].pk
    [victim] = claims_of(claim_statement("default", worker=owner, paths=[path]).execute(1, "x"), owner)
    resting(2)
    assert Task.objects.get(pk=victim.id).status == "RUNNING"
    beats.set()
    Worker.objects.filter(name="older").update(heartbeat_at=Now() - timedelta(seconds=LIMIT / 2))
    eventually(lambda: Task.objects.get(pk=victim.id).status == "SUCCESSFUL", why="nobody rescues it")
    assert Task.objects.get(pk=victim.id).rescues == 1
    eventually(lambda: not any(map(rests, rows())), why="one rests although nobody else beats often")


def test_a_worker_frozen_during_its_rest_beats_before_it_claims(resting, rescuer, eventually):
    [process] = resting()
    row = rows().get()
    process.send(signal.SIGSTOP)
    rescuer()
    eventually(lambda: not Worker.objects.filter(pk=row.pk).exists(), why="its row is not removed")
    results = [tasks.nothing.enqueue() for _ in range(3)]
    process.send(signal.SIGCONT)
    for result in results:
        eventually(lambda result=result: Task.objects.get(pk=result.id).status == "SUCCESSFUL", why=process.output)
    assert set(Task.objects.values_list("attempts", "rescues")) == {(1, 0)}
    assert Worker.objects.filter(pk=row.pk).exists()
