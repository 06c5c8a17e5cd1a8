"""Rounds of upkeep: which worker runs them, schedules, the history, and independent steps."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from uuid import uuid4

import pytest
from django.db import connections
from django.db.models.functions import Now

from django_pglock import conf
from django_pglock.conf import get_settings
from django_pglock.models import Number, Schedule, Task, Worker
from django_pglock.store import liveness
from django_pglock.store.liveness import UPKEEP_PARENTS
from django_pglock.store.numbers import KEPT, Counts, add_numbers
from django_pglock.worker.parent import upkeep
from tests.db.store.schedules import HOUR, decorate
from tests.sample import scheduled, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


@pytest.fixture
def older_parents(monkeypatch):
    """Workers of parents that have started earlier; their last heartbeat counts for long."""
    monkeypatch.setattr(conf, "BEATS_TO_THE_LIMIT", 4000)
    monkeypatch.setattr(liveness, "LATE", 1e4)
    row = {"pid": 7, "queues": [], "threads": 1, "started_at": Now() - timedelta(days=1)}
    return [Worker.objects.create(id=uuid4(), parent=uuid4(), **row).pk for _ in range(UPKEEP_PARENTS)]


def test_a_younger_parent_takes_over_upkeep_when_an_older_one_is_gone(worker, eventually, older_parents, monkeypatch):
    """Otherwise the tasks of the older worker would wait for the next round, which is rare for a younger parent."""
    monkeypatch.setattr(upkeep, "STANDBY_FACTOR", 1_000_000)
    running = worker()
    eventually(lambda: running.heartbeat.older_parents == UPKEEP_PARENTS)
    eventually(lambda: (running.upkeep._sleep or 0) > upkeep.LINGER, why="it does not rest")
    orphan = Task.objects.create(
        queue="default",
        backend="default",
        task_path=tasks.nothing.module_path,
        status="RUNNING",
        attempts=1,
        worker=older_parents[0],
        started_at=Now(),
        last_attempted_at=Now(),
    )
    Worker.objects.filter(pk=older_parents[0]).delete()
    eventually(lambda: Task.objects.filter(pk=orphan.pk, status="SUCCESSFUL").exists(), why="nobody has rescued it")


@pytest.mark.parametrize(("step", "restarts"), [(-300.0, 1), (300.0, 0), (0.0, 0)])
def test_the_upkeep_notices_that_the_clock_was_put_back(monkeypatch, step, restarts):
    """An answer that takes long is no step."""
    moments, clocks = iter([0.0, 1.0, 10.0, 19.0]), iter([1000.0, 1010.0 + step])
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(upkeep, "clock", lambda using: next(clocks))
    restarted = []
    monkeypatch.setattr(upkeep, "restart_delays", lambda using: restarted.append(using) or 0)
    service = upkeep.Upkeep.__new__(upkeep.Upkeep)
    service.using, service._clock_ahead = "default", -math.inf
    service._notice_step_of_clock()
    service._notice_step_of_clock()
    assert len(restarted) == restarts


def test_a_notification_that_was_lost_is_repeated(worker, eventually, settings):
    """A process may die after its commit of a task, before its notification. The next beats find the task."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    task = Task.objects.create(queue="default", backend="default", task_path=tasks.nothing.module_path)
    eventually(lambda: Task.objects.filter(pk=task.pk, status="SUCCESSFUL").exists(), why="nobody was woken")


def test_a_tick_is_not_late_and_wakes_an_idle_worker(pooled, worker, eventually, settings):
    """Without its own timer, and without waking the feeder, the tick would come after ten minutes."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "POLL_INTERVAL": 600.0}
    decorate(scheduled.nightly, every=0.4)
    worker()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() >= 4)
    made = Task.objects.values_list("meta__schedule", flat=True)
    assert len(set(made)) == len(made), "each tick once"


def test_a_worker_knows_functions_that_are_decorated_later(worker, eventually):
    worker()
    eventually(lambda: Task.objects.count() == 0)
    decorate(scheduled.nightly, every=0.1)
    eventually(lambda: Effect.objects.filter(name="nightly").exists())
    decorate(scheduled.nightly, every=HOUR)
    eventually(lambda: Schedule.objects.filter(expression="every 3600 s").exists())


def failing(step):
    """Return a function for a step of upkeep."""

    def fail(using, *args, **kwargs):
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    fail.__qualname__ = step
    return fail


@pytest.mark.parametrize(
    "steps",
    [["promote"], ["rescue"], ["open_rates", "blocked_keys", "orphaned_waiters", "next_due_in", "prune_window"]],
    ids=["promote", "rescue", "all others"],
)
def test_a_failing_step_of_upkeep_does_not_stop_the_others(claim, worker, eventually, monkeypatch, caplog, steps):
    """As a statement that exceeds its timeout in each round."""
    decorate(scheduled.nightly, every=0.1)
    tasks.record.enqueue("rescued")
    claim()
    tasks.record.using(run_after=timedelta(seconds=0.3)).enqueue("promoted")
    expected = {"nightly", "promoted", "rescued"} - {
        {"promote": "promoted", "rescue": "rescued"}.get(step) for step in steps
    }
    with monkeypatch.context() as patch:
        for step in steps:
            patch.setattr(upkeep, step, failing(step))
        running = worker()
        eventually(lambda: expected <= set(Effect.objects.values_list("name", flat=True)))
        eventually(lambda: caplog.text.count("failed. The worker keeps trying") == len(steps))
        assert running.upkeep.reconnects == 0
    # Pruning rests for some minutes when it has done its work.
    eventually(lambda: caplog.text.count("works again") >= len({*steps} - {"prune_window"}))
    assert caplog.text.count("failed. The worker keeps trying") == len(steps)


@pytest.mark.parametrize("step", ["promote", "prune_window"])
def test_a_session_that_ends_in_a_step_of_upkeep_is_replaced_by_one_with_our_limits(
    worker, eventually, monkeypatch, caplog, step
):
    """Otherwise Django would open the next session itself, without our timeouts."""

    def end_session(using, *args, **kwargs):
        patch.undo()
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with monkeypatch.context() as patch:
        patch.setattr(upkeep, step, end_session)
        running = worker()
        eventually(lambda: running.upkeep.reconnects == 1)
        eventually(lambda: "The upkeep works again" in caplog.text)
    assert "The upkeep step" not in caplog.text


def test_attempts_that_were_lost_with_their_workers_are_counted(worker, claim, eventually):
    for _ in range(4):
        tasks.nothing.enqueue()
    poison, cancelled, *_ = claim(4)
    Task.objects.filter(pk=poison.id).update(rescues=get_settings().MAX_RESCUES)
    Task.objects.filter(pk=cancelled.id).update(cancel_requested_at=Now())
    worker(queues=["another"])
    eventually(lambda: Number.objects.filter(seconds=60, queue="", kind="lost").exists())
    rows = Number.objects.filter(seconds=60, task_path=tasks.nothing.module_path)
    assert dict(rows.values_list("kind", "count")) == {"lost": 2, "failed": 1, "cancelled": 1}


def test_old_numbers_are_deleted(worker, eventually):
    old = int(datetime.now(timezone.utc).timestamp() // 3600 * 3600) - KEPT[3600] - 3600
    add_numbers("default", {(old, "mail", "app.send"): Counts(succeeded=1)})
    worker()
    eventually(lambda: not Number.objects.filter(seconds__gt=0, queue="mail").exists())
