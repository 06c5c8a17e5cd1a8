"""Each tick of a schedule is enqueued once, also with concurrent workers."""

from __future__ import annotations

import logging
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock.models import Schedule, Task
from django_pglock.store import schedule_tick
from django_pglock.store.schedule_tick import enqueue_due
from django_pglock.tasks import registry
from django_pglock.tasks.compat import task_enqueued
from django_pglock.tasks.options import Unique
from tests.db.store.schedules import HOUR, HOURLY, NIGHTLY, schedule, ticks
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_tick_is_enqueued_and_the_next_one_counts_from_it(monkeypatch):
    row = schedule(due=timedelta(seconds=1))
    with monkeypatch.context() as slow:
        slow.setattr(schedule_tick, "time", SimpleNamespace(monotonic=iter((0.0, 1800.0)).__next__))
        enqueued = enqueue_due("default")
    [made] = Task.objects.all()
    assert enqueued.tasks == [made.pk]
    assert 1200 < enqueued.next_in <= 1800
    assert (made.task_path, made.status, made.meta) == (NIGHTLY, "READY", {"schedule": row.next_at.isoformat()})
    after = Schedule.objects.get()
    assert (after.next_at, after.last_at, after.last_task) == (row.next_at + HOUR, row.next_at, made.pk)
    assert enqueue_due("default").tasks == []


def test_each_of_two_schedules_with_the_same_date_has_its_own_next_tick():
    one, other = schedule(due=5.5 * HOUR), schedule(scheduled.hourly, every=4 * HOUR)
    Schedule.objects.update(next_at=one.next_at)
    assert len(enqueue_due("default").tasks) == 2
    dates = dict(Schedule.objects.values_list("pk", "next_at"))
    assert dates == {one.pk: one.next_at + 6 * HOUR, other.pk: one.next_at + 8 * HOUR}


@pytest.mark.parametrize("change", [{"next_at": F("next_at") + 9 * HOUR}, {"is_enabled": False}], ids=str)
def test_a_schedule_that_has_changed_since_it_was_read_is_left_out(monkeypatch, change):
    """As when another worker takes the tick at this moment, or a person disables the schedule."""
    schedule(due=HOUR)
    read = schedule_tick.read_rows

    def read_and_change(*values):
        found = read(*values)
        Schedule.objects.update(**change)
        return found

    monkeypatch.setattr(schedule_tick, "read_rows", read_and_change)
    assert enqueue_due("default").tasks == []
    assert not Task.objects.exists()


def test_ticks_are_refused_within_a_transaction():
    """A tick that fails would undo the others, and each tick would be kept back until the end."""
    schedule(due=timedelta(seconds=1))
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        enqueue_due("default")


@pytest.mark.parametrize("options", [{"every": HOUR}, {"every": None, "cron": "0 * * * *"}], ids=["every", "cron"])
def test_missed_ticks_are_replaced_by_one_run(options):
    schedule(**options)
    Schedule.objects.update(next_at=F("next_at") - 24 * HOUR)
    missed = Schedule.objects.get().next_at
    for _ in range(3):
        enqueue_due("default")
    assert ticks() == [(NIGHTLY, missed.isoformat())]
    row = Schedule.objects.get()
    assert timedelta(0) < row.next_at - timezone.now() <= HOUR
    assert (row.next_at - missed) % HOUR == timedelta(0)


def test_a_tick_enqueues_a_task_with_the_options_of_its_function(claim):
    schedule(due=HOUR, queue_name="night", priority=7, lock="night", max_attempts=4, meta={"who": "me"})
    enqueue_due("default")
    row = Task.objects.get()
    assert (row.queue, row.priority, row.lock_key, row.max_retries, row.meta["who"]) == ("night", 7, "night", 3, "me")
    assert row.status == "READY", "it was admitted"


def test_a_tick_whose_task_is_a_duplicate_is_skipped_and_logged(caplog):
    caplog.set_level(logging.INFO, logger="django_pglock.tasks")
    row = schedule(due=HOUR, unique=Unique(on_conflict="raise"))
    first = registry.find(NIGHTLY).enqueue()
    assert enqueue_due("default").tasks == []
    assert f"The schedule of {NIGHTLY} enqueued no task: Task {first.id}" in caplog.text
    after = Schedule.objects.get()
    assert after.next_at > row.next_at
    assert (after.last_at, after.last_task) == (None, None)


def test_with_unique_skip_an_existing_task_counts_as_the_task_of_the_tick():
    schedule(due=HOUR, unique=True)
    first = registry.find(NIGHTLY).enqueue()
    assert enqueue_due("default").tasks == [int(first.id)]
    assert Task.objects.count() == 1


def test_a_tick_is_skipped_while_the_run_before_is_unfinished(claim):
    """While a run takes longer than the interval, no other run of the schedule begins or is enqueued."""
    schedule(due=3 * HOUR, unique=Unique(while_="unfinished"))
    [first] = enqueue_due("default").tasks
    claim()
    Schedule.objects.update(next_at=Now())
    assert enqueue_due("default").tasks == [first]
    assert list(Task.objects.values_list("pk", "status")) == [(first, "RUNNING")]
    Task.objects.update(status="SUCCESSFUL", finished_at=Now())
    Schedule.objects.update(next_at=Now())
    assert enqueue_due("default").tasks != [first]


@pytest.fixture
def receiver():
    """Fail whenever a task of one path is enqueued."""
    receivers = []

    def connect(path, error):
        def fail(sender, task_result, **kwargs):
            if task_result.task.module_path == path:
                raise error

        receivers.append(fail)
        task_enqueued.connect(fail)
        return fail

    yield connect
    for each in receivers:
        task_enqueued.disconnect(each)


def test_a_tick_that_cannot_be_enqueued_is_skipped_and_stops_no_other(receiver, caplog):
    row = schedule(due=2 * HOUR)
    schedule(scheduled.hourly, due=HOUR)
    receiver(NIGHTLY, RuntimeError("a receiver with a bug"))
    assert len(enqueue_due("default").tasks) == 1
    assert [path for path, _ in ticks()] == [HOURLY]
    assert "cannot be enqueued" in caplog.text
    assert "a receiver with a bug" in caplog.text
    after = Schedule.objects.get(pk=NIGHTLY)
    assert after.next_at > timezone.now() > row.next_at
    assert after.last_at is None


def test_a_tick_that_the_database_refuses_is_tried_again_after_a_pause(receiver, caplog):
    row = schedule(due=2 * HOUR)
    schedule(scheduled.hourly, due=HOUR)
    fail = receiver(NIGHTLY, OperationalError("the disk is full"))
    looked = enqueue_due("default")
    assert [path for path, _ in ticks()] == [HOURLY]
    assert "The worker tries again: the disk is full" in caplog.text
    assert looked.next_in > 0
    assert Schedule.objects.get(pk=NIGHTLY).next_at == row.next_at
    task_enqueued.disconnect(fail)
    assert len(enqueue_due("default").tasks) == 1


def test_a_schedule_that_cannot_be_read_stops_no_other(caplog):
    schedule(due=HOUR)
    schedule(scheduled.hourly, due=HOUR)
    Schedule.objects.filter(pk=NIGHTLY).update(expression="when it rains")
    assert len(enqueue_due("default").tasks) == 1
    assert "'when it rains' in '', cannot be read" in caplog.text


def test_a_tick_and_its_task_commit_together_and_a_locked_tick_causes_no_wait(in_threads, caplog):
    """While another transaction locks the tick, other workers skip it. After a rollback the tick is due again."""
    schedule(due=HOUR)
    with transaction.atomic():
        Schedule.objects.update(next_at=Now() + HOUR)
        [looked] = in_threads(lambda number: enqueue_due("default"), 1)
        assert looked.tasks == []
        assert looked.next_in > 0
        assert caplog.text == "", "it did not run into its lock_timeout"
        transaction.set_rollback(True)
    assert len(enqueue_due("default").tasks) == 1


def test_a_unique_task_in_an_open_transaction_delays_a_tick_only_briefly(in_threads, caplog):
    schedule(due=HOUR, unique=True)
    with transaction.atomic():
        registry.find(NIGHTLY).enqueue()
        [looked] = in_threads(lambda number: enqueue_due("default"), 1)
        transaction.set_rollback(True)
    assert looked.tasks == []
    assert "lock timeout" in caplog.text
    assert len(enqueue_due("default").tasks) == 1
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


def test_enqueue_due_limits_the_idle_time_of_its_transaction():
    seen = []

    def look(sender, **kwargs):
        with connection.cursor() as cursor:
            cursor.execute("SHOW idle_in_transaction_session_timeout")
            seen.append(cursor.fetchone()[0])

    schedule(due=HOUR)
    task_enqueued.connect(look)
    try:
        enqueue_due("default")
    finally:
        task_enqueued.disconnect(look)
    assert seen == ["10s"]
    with connection.cursor() as cursor:
        cursor.execute("SHOW idle_in_transaction_session_timeout")
        assert cursor.fetchone() == ("0",)
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)


def test_dates_are_right_without_time_zones(settings):
    settings.USE_TZ, settings.TIME_ZONE = False, "America/New_York"
    connection.close()
    try:
        row = schedule(due=HOUR)
        assert len(enqueue_due("default").tasks) == 1
        after = Schedule.objects.get()
        assert (after.last_at, after.next_at) == (row.next_at, row.next_at + 2 * HOUR)
    finally:
        connection.close()
