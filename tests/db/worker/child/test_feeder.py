"""The feeder: what it claims, when, and what it gives back."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
from django.db import OperationalError, transaction
from django.test import override_settings

from django_pglock import enqueue_many
from django_pglock.conf import Settings
from django_pglock.models import Task, Worker
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.worker.child import feeder as module
from django_pglock.worker.child.claimer import ALL, SYNC
from django_pglock.worker.child.feeder import CERTAIN_AFTER
from tests.db.worker.conftest import make_feeder
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.settings_slow_beats import DJANGO_PGLOCK
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_whose_heartbeats_do_not_arrive_claims_nothing(worker, finished, eventually, monkeypatch):
    """As when the server refuses new sessions: others would take what it claims from it, while it runs."""
    here = worker()
    finished(tasks.nothing.enqueue())
    allowed = threading.Event()
    heartbeat = here.crew.heartbeat
    connect = heartbeat.open
    monkeypatch.setattr(heartbeat, "open", lambda: connect() if allowed.is_set() else refuse())
    execute_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lockworker heartbeat'"
    )
    eventually(lambda: not here.child.heartbeat.is_alive(), why="the heartbeat has a session all the time")
    result = tasks.nothing.enqueue()
    time.sleep(0.5)
    [heard_since] = execute_sql("SELECT clock_timestamp()")[0]
    allowed.set()
    finished(result)
    row = Task.objects.get(pk=result.id)
    assert (row.attempts, row.rescues) == (1, 0)
    assert row.started_at > heard_since, "claimed by a worker that counts as dead"


def refuse():
    raise OperationalError("sorry, too many clients already")


def test_a_scheduled_task_runs_when_it_is_due_without_a_poll(worker, finished, eventually, settings):
    """Without the timer of the next due task it would be ten minutes late."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "POLL_INTERVAL": 600.0}
    worker()
    eventually(Worker.objects.filter(is_sleeping=True).exists)
    # This process may have seen a moment ago that no worker sleeps. Then it would notify none of the task.
    time.sleep(NEGATIVE_TTL)
    result = finished(tasks.nothing.using(run_after=timedelta(seconds=0.5)).enqueue())
    row = Task.objects.get(pk=result.id)
    assert row.last_attempted_at >= row.run_after


def test_waiting_claims_are_given_back_for_an_idle_worker(worker, eventually, gate):
    """The first worker has learnt that tasks are quick and claims ahead; then a long one blocks its only thread."""
    worker(threads=1, grace=0)
    for _ in range(300):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 300)
    with transaction.atomic():
        running_tasks.wait_for_note.enqueue("go on")
        for number in range(30):
            tasks.record.enqueue("quick", number)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    worker(threads=1)
    eventually(lambda: Effect.objects.filter(name="quick").count() == 30, why="they were hoarded")
    running = Task.objects.filter(status="RUNNING").values_list("task_path", flat=True)
    long = running_tasks.wait_for_note.module_path
    eventually(lambda: list(running.all()) == [long], why="the long one still runs")
    assert set(Effect.objects.filter(name="quick").values_list("number", flat=True)) == set(range(30))


def test_waiting_claims_are_given_back_while_longer_tasks_end_one_by_one(worker, eventually, monkeypatch):
    """Each end within 0.2 s is progress, but the tasks behind it wait for seconds."""
    in_flight, given_back = worker(threads=1, grace=0).in_flight, []
    give_back = in_flight.give_back_waiting
    monkeypatch.setattr(in_flight, "give_back_waiting", lambda: given_back.append(give_back()))
    # As after many short tasks.
    in_flight.threads.cost = 1e-6
    with transaction.atomic():
        for _ in range(40):
            running_tasks.run_sql.enqueue(0.06)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 40)
    assert sum(given_back) > 10


@pytest.mark.parametrize("case", ["one kind", "just asked", "missed"])
def test_a_notification_of_one_queue_hides_no_task_of_another(case):
    """No notification comes for a task that was ready before this worker asked, or while nobody listened for it."""
    feeder = make_feeder(names=["a", "b"])
    feeder._ask()
    if case != "just asked":
        # Now other processes have read that this worker sleeps.
        feeder.asked_at -= 1.0
    feeder._claim(SYNC if case == "one kind" else ALL, 2)
    Task.objects.create(queue="a", backend="default", task_path=tasks.nothing.module_path)
    feeder.in_flight.notify_feeder("b")
    if case == "missed":
        feeder.in_flight.notify_feeder()
    feeder._hear()
    assert [claim.queue for claim in feeder._claim(ALL, 2)] == ["a"]


@pytest.mark.parametrize("is_first_async", [False, True])
def test_a_backlog_of_one_kind_of_functions_does_not_keep_the_other_kind_waiting(is_first_async):
    """The tasks of the backlog end long after the test, and take all the capacity of their kind."""
    feeder, calls = make_feeder(), [(tasks.nothing, {}), (tasks.sleep_async, {"seconds": 600})]
    (first, backlog), (second, call) = reversed(calls) if is_first_async else calls
    enqueue_many(first, [backlog] * 150)
    enqueue_many(second, [call] * 3)
    claimed = Counter()
    while (poll := feeder._next_claim()) != (ALL, 0):
        claims = feeder._claim(*poll)
        feeder.in_flight.begin_all(claims)
        claimed.update(claim.task_path for claim in claims)
    assert claimed == {first.module_path: 100 if is_first_async else 4, second.module_path: 3}
    assert feeder._left_out_until < math.inf, "a moment later it looks again, and reads the whole backlog"


# A worker that cannot take what it was notified of wakes others.


@pytest.fixture
def two(worker, eventually, settings):
    """Return two sleeping workers. The next poll comes in ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    pair = worker(threads=1), worker(threads=1, queues=["default"])
    eventually(lambda: Worker.objects.filter(is_sleeping=True).count() == 2)
    # Until both have made the last poll before they sleep.
    for each in pair:
        eventually(lambda each=each: each.feeder._is_rest_empty)
    return pair


def notify(worker):
    """Make a ready task, of which only this worker is notified."""
    row = Task.objects.create(queue="default", backend="default", task_path=tasks.nothing.module_path)
    worker.in_flight.notify_feeder("default")
    return Task.objects.filter(pk=row.pk, status="SUCCESSFUL")


def test_a_worker_without_a_free_thread_wakes_others(two, eventually):
    first, other = two
    running_tasks.wait_for_note.using(queue_name="of the first").enqueue("the end")
    eventually(lambda: first.in_flight.threads.running == 1)
    for _ in range(3):
        assert eventually(notify(first).first).worker == other.id
    eventually(Worker.objects.filter(pk=first.id, is_sleeping=False).exists, why="others would go on to rely on it")
    running_tasks.note("the end")
    eventually(Worker.objects.filter(pk=first.id, is_sleeping=True).exists)


def test_a_task_that_a_worker_may_not_run_is_claimed_by_others(two, eventually):
    """The worker does not know the function, or serves another backend."""
    first, other = two
    first.feeder.claimer.backend = "another"
    first.feeder.claimer._known = -1
    assert eventually(notify(first).first).worker == other.id


def test_a_notification_that_comes_during_a_poll_is_kept(monkeypatch):
    """The poll may not have seen its task. Before, the end of the poll forgot to wake others for it."""
    feeder, woken = make_feeder(), []
    monkeypatch.setattr(module, "wake_others", lambda using, queues, *others, **hops: woken.append(queues))
    feeder.in_flight.notify_feeder("a")
    feeder._hear()
    feeder.in_flight.notify_feeder("b")
    feeder._wake_others_if(False)
    feeder._leave_to_others()
    assert woken == [["b"]]


# A worker compares the table with its claims only while the table may have claims that the worker does not know.


LIMIT = Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT


@pytest.fixture
def feeder(settings):
    settings.DJANGO_PGLOCK = DJANGO_PGLOCK
    return make_feeder()


def compare(feeder):
    """Compare if the table may have other claims, and the limit has passed. Return whether it was necessary."""
    before = feeder._compared_at = feeder._compared_at - LIMIT
    feeder._compare_if_due()
    return feeder._compared_at > before


def test_a_claim_whose_answer_was_lost_is_given_back_by_a_later_comparison(feeder, claim):
    """Its date is younger than the limit at the first comparison, so there has to be a later one."""
    assert not compare(feeder), "there was no claim"
    feeder.in_flight.changed_at = time.monotonic()
    tasks.nothing.enqueue()
    claim(worker=feeder.worker)
    assert compare(feeder)
    assert Task.objects.get().status == "RUNNING", "its answer may still come"
    with override_settings(DJANGO_PGLOCK={**DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.01}):
        time.sleep(0.2)
        feeder.in_flight.changed_at = time.monotonic()
        assert compare(feeder)
    assert Task.objects.get().status == "READY"
    feeder.in_flight.changed_at -= CERTAIN_AFTER * LIMIT
    assert not compare(feeder)


def test_a_sleeping_feeder_compares(worker, claim, eventually, settings, monkeypatch):
    """Otherwise it would sleep for many poll intervals, because it finds nothing and nobody notifies it."""
    monkeypatch.setattr("django_pglock.worker.child.feeder.LISTENING_FACTOR", 10**9)
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.1, "POLL_INTERVAL": 0.5}
    process = worker(queues=["another"])
    eventually(lambda: process.feeder._is_rest_empty)
    tasks.nothing.enqueue()
    claim(worker=process.id)
    process.in_flight.changed_at = time.monotonic()
    process.in_flight.notify_feeder()
    eventually(Task.objects.filter(status="READY").exists)
