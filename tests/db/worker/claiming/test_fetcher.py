"""The fetcher: what it claims, when, and what it gives back."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import OperationalError, connection, transaction

from django_pglock.conf import get_settings
from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.store.liveness import beat_all
from django_pglock.store.wake import NEGATIVE_TTL
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.worker.claiming.claimer import Claimer
from django_pglock.worker.claiming.fetcher import LISTENING_FACTOR, LONGEST_WAIT
from django_pglock.worker.claiming.function_kinds import KindPauses
from django_pglock.worker.claiming.queue_cursor import QueueCursor
from django_pglock.worker.in_flight import MOST_UNSETTLED
from django_pglock.worker.worker import Worker
from tests.conftest import NEVER
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_higher_priorities_run_first(worker, finished):
    for number, priority in enumerate((0, 10, -10, 10)):
        result = tasks.record.using(priority=priority).enqueue("order", number)
    worker(threads=1)
    finished(result)
    # The last ones may still be to come, also between two polls.
    found = [effect.number for effect in Effect.objects.order_by("id")]
    assert len(found) >= 2
    assert found == [1, 3, 0, 2][: len(found)]


def test_a_worker_serves_only_the_queues_of_its_option(worker, finished):
    other = tasks.nothing.using(queue_name="other").enqueue()
    worker(queues=["default", "mail"])
    finished(tasks.nothing.using(queue_name="mail").enqueue())
    other.refresh()
    assert other.status == TaskResultStatus.READY


def test_a_worker_without_queues_serves_all(worker, finished):
    results = [tasks.nothing.using(queue_name=name).enqueue() for name in ("a", "b", "a", "c")]
    worker()
    for result in results:
        finished(result)


def test_a_worker_whose_heartbeats_do_not_arrive_claims_nothing(worker, finished, eventually, monkeypatch):
    """As when the server refuses new sessions: others would take what it claims from it, while it runs."""
    here = worker()
    finished(tasks.nothing.enqueue())
    allowed = threading.Event()
    connect = here.heartbeat.open
    monkeypatch.setattr(here.heartbeat, "open", lambda: connect() if allowed.is_set() else refuse())
    eventually(lambda: not here.heartbeat.check_heartbeat(), why="the heartbeat has a session all the time")
    result = tasks.nothing.enqueue()
    time.sleep(0.5)
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        [heard_since] = cursor.fetchone()
    allowed.set()
    finished(result)
    row = Task.objects.get(pk=result.id)
    assert (row.attempts, row.rescues) == (1, 0)
    assert row.started_at > heard_since, "claimed by a worker that counts as dead"


def test_a_worker_that_was_stopped_for_too_long_claims_nothing_before_its_next_heartbeat(
    worker, finished, eventually, settings
):
    """Its tasks have been rescued, and others would take what it claims before they know that it lives."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 0.1}
    here = worker()
    finished(tasks.nothing.enqueue())
    here.heartbeat.beat_at -= 2001
    # A look that began before may still claim.
    stopped_at = time.monotonic()
    eventually(lambda: here.fetcher._progressed_at > stopped_at, why="the fetcher does not look again")
    result = tasks.nothing.enqueue()
    time.sleep(1)
    assert Task.objects.get(pk=result.id).status == "READY"
    here.heartbeat.beat_at += 2001
    finished(result)


@pytest.mark.parametrize("age", [0, 700])
def test_a_worker_that_rests_beats_before_it_claims(age, worker, eventually, monkeypatch, settings):
    """Its session may be lost, and nobody may have noticed: then it may look dead to others for seconds.

    Or the task lets no other thread run, and the heartbeat process believes that a beat has come since the last one.
    """
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 6000.0, "POLL_INTERVAL": 600.0}
    here, allowed, beaten = worker(), threading.Event(), []
    # It polls twice after it has asked for notifications. A poll that began before the rest may still claim.
    eventually(lambda: here.fetcher.next_report_by > time.monotonic() + 60, why="the fetcher does not sleep")

    def beat_when_allowed(using, beats):
        beaten.append(1)
        assert allowed.wait(NEVER)
        return beat_all(using, beats)

    monkeypatch.setattr("django_pglock.worker.liveness.heartbeat.beat_all", beat_when_allowed)
    here.heartbeat.rest.is_on = True
    here.heartbeat.beat_at -= age
    result = tasks.nothing.enqueue()
    eventually(lambda: beaten, why="it does not beat")
    time.sleep(0.5)
    assert Task.objects.get(pk=result.id).status == "READY", "it does not wait for its beat"
    allowed.set()
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL", why="it waits for its poll")
    row = Task.objects.get(pk=result.id)
    assert row.enqueued_at < WorkerRow.objects.get().heartbeat_at < row.started_at
    assert not here.heartbeat.rest.is_on


def refuse():
    raise OperationalError("sorry, too many clients already")


def hold_back(fetcher):
    fetcher.in_flight.settling = MOST_UNSETTLED + 1


def silence(fetcher):
    fetcher.liveness = SimpleNamespace(check_heartbeat=lambda: False)


def run_exclusively(fetcher):
    suspect = SimpleNamespace(id=1, attempt=1, task_path="suspect", rescues=get_settings().MAX_RESCUES)
    fetcher._exclusive_run.hold_back_suspects([suspect])


@pytest.mark.parametrize("prevent", [hold_back, silence, run_exclusively])
def test_a_fetcher_that_may_not_claim_sleeps_between_polls(prevent, monkeypatch):
    """A thread may be nearly free since its last poll, and the pause of a kind of functions may be over."""
    fetcher, waited = Worker(threads=1).fetcher, []
    monkeypatch.setattr(fetcher.in_flight.fetcher_wakeup, "wait", waited.append)
    fetcher.claimer.was_full = True
    fetcher.claimer.pauses.note("async", took=60.0, found=1)
    fetcher._prepare_poll(is_last_poll=False)
    assert fetcher.claimer.paused_kinds == ["async"]
    fetcher.claimer.pauses = KindPauses()
    fetcher.in_flight.threads.expect_cost(1.0)
    fetcher.in_flight.threads.slots[0].began_at = fetcher._polled_at - 1
    fetcher._polled_at -= 2
    assert fetcher.in_flight.threads.next_change_in(fetcher._polled_at) == 0
    prevent(fetcher)
    fetcher.run_once()
    assert waited
    assert min(waited) > 0


def test_a_scheduled_task_runs_when_it_is_due_without_a_poll(worker, finished, eventually, settings):
    """Without the timer of the next due task it would be ten minutes late."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 600.0}
    worker()
    eventually(WorkerRow.objects.filter(is_sleeping=True).exists)
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
    in_flight.threads.expect_cost(1e-6)
    with transaction.atomic():
        for _ in range(40):
            running_tasks.run_sql.enqueue(0.06)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 40)
    assert sum(given_back) > 10


def test_a_slow_poll_is_repeated_before_the_worker_sleeps(worker, eventually, monkeypatch, settings):
    """No process may have notified it of a task that came meanwhile: no worker slept a moment ago."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 600.0}
    claim, made = Claimer.claim, []

    def claim_slowly(self, capacities, **options):
        claims = claim(self, capacities, **options)
        if not made and WorkerRow.objects.filter(is_sleeping=True).exists():
            made.append(enqueue_silently("default"))
            time.sleep(NEGATIVE_TTL * 2)
        return claims

    monkeypatch.setattr(Claimer, "claim", claim_slowly)
    worker()
    eventually(lambda: made and Task.objects.filter(status="SUCCESSFUL").exists(), why="it waits for its poll")


def enqueue_silently(queue):
    """Make a ready task without a notification."""
    return Task.objects.create(queue=queue, backend="default", task_path=tasks.nothing.module_path)


def poll(fetcher, capacities=(("both", 2),)):
    """Poll once, and return the queues of the claimed tasks."""
    fetcher._prepare_poll(is_last_poll=False)
    return [claim.queue for claim in fetcher._claim(list(capacities))]


@pytest.mark.parametrize("capacities", [[("both", 2)], [("sync", 2)]])
def test_a_notification_of_one_queue_hides_no_task_of_another(capacities):
    """The worker was not notified of tasks that were ready before it asked for notifications."""
    fetcher = Worker(queues=["a", "b"]).fetcher
    fetcher.sleep.begin()
    enqueue_silently("a")
    fetcher.sleep.note_ready("b")
    assert poll(fetcher, capacities) == ["a"]


def test_only_the_queues_of_notifications_are_read_after_a_poll_has_found_nothing(monkeypatch):
    """Then the worker is notified of each new task."""
    fetcher = Worker(queues=["a", "b"]).fetcher
    fetcher.sleep.begin()
    monkeypatch.setattr(fetcher.sleep, "since", fetcher.sleep.since - 1)
    # This poll leaves out async functions, so it does not show that a queue is empty.
    assert poll(fetcher, [("sync", 2)]) == []
    enqueue_silently("a")
    fetcher.sleep.note_ready("b")
    assert poll(fetcher) == ["a"]
    assert poll(fetcher) == []
    enqueue_silently("a")
    fetcher.sleep.note_ready("b")
    assert poll(fetcher) == []
    fetcher.sleep.note_missed()
    fetcher.sleep.note_ready("b")
    assert poll(fetcher) == ["a"], "a notification of it may have been missed"


def sleeps_until_poll(fetcher):
    """Return whether it has polled for the last time before a long sleep."""
    return fetcher._are_others_empty and fetcher._discovery.next_in == math.inf


@pytest.mark.parametrize("queues", [[], ["default"]], ids=["all", "one"])
def test_a_thread_that_becomes_free_claims_a_task_that_was_locked(queues, worker, eventually, settings, gate):
    """The last poll skipped its row. Nobody is notified of it, and the next poll would come ten minutes later."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 600.0}
    running_tasks.wait_for_note.enqueue("go on")
    row = enqueue_silently("default")
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=row.pk)
        polling = worker(queues=queues)
        eventually(lambda: polling.in_flight.running and sleeps_until_poll(polling.fetcher))
    gate()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2)


def test_a_thread_that_becomes_free_claims_a_task_without_a_notification(worker, eventually, settings, gate):
    """A trigger that enqueues reads whether a worker sleeps, and its transaction commits much later."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 600.0}
    running_tasks.wait_for_note.enqueue("go on")
    polling = worker()
    eventually(lambda: polling.in_flight.running and sleeps_until_poll(polling.fetcher))
    enqueue_silently("default")
    gate()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2)


def test_claims_whose_answer_took_long_are_run(worker, finished, monkeypatch):
    """They have not waited for a thread yet, so they are not given back for having waited."""
    claim = QueueCursor.claim

    def claim_slowly(self, limit):
        claims = claim(self, limit)
        time.sleep(LONGEST_WAIT * 1.2)
        return claims

    monkeypatch.setattr(QueueCursor, "claim", claim_slowly)
    worker()
    result = finished(tasks.nothing.enqueue())
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert Task.objects.get().attempts == 1


@pytest.mark.parametrize(("is_listening", "count"), [(False, 1), (True, LISTENING_FACTOR)])
def test_a_worker_with_certain_notifications_polls_rarely(settings, monkeypatch, is_listening, count):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 0.01}
    fetcher, pauses = Worker().fetcher, []
    fetcher.liveness = SimpleNamespace(is_listening=lambda: is_listening, is_resting=lambda: False)
    monkeypatch.setattr(fetcher, "_pause", lambda seconds: (pauses.append(seconds), time.sleep(seconds)))
    fetcher._sleep_until_poll()
    assert len(pauses) == count


def test_a_notification_ends_a_long_sleep(monkeypatch):
    fetcher, pauses = Worker().fetcher, []
    monkeypatch.setattr(fetcher, "_pause", pauses.append)
    fetcher.liveness = SimpleNamespace(is_listening=lambda: True)
    fetcher._sleep_until_poll()
    assert len(pauses) == 1, "it has not slept for as long as it wanted to"
