"""Schedules in the database: registered once, each tick enqueued once, whatever the others do."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock import task
from django_pglock.models import Schedule, Task
from django_pglock.store import schedule as schedule_module
from django_pglock.store.schedule import enqueue_due, known, register
from django_pglock.tasks import registry
from django_pglock.tasks.compat import BaseTaskBackend, task_enqueued
from django_pglock.tasks.options import Unique
from django_pglock.worker.upkeep import upkeep
from tests.sample import scheduled, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]

NIGHTLY, HOURLY = "tests.sample.scheduled.nightly", "tests.sample.scheduled.hourly"
HOUR = timedelta(hours=1)


def decorate(function, **options):
    """Decorate it, as a module does that is loaded again; what is registered is the definition that was first."""
    registry._definitions.pop(f"{function.__module__}.{function.__name__}", None)
    return task(**options)(function)


def schedule(function=scheduled.nightly, *, due=None, **options):
    """Decorate and register a function; with ``due``, its tick came so long ago. Returns its row."""
    decorated = decorate(function, **{"every": HOUR, **options})
    register("default")
    row = Schedule.objects.get(pk=decorated.module_path)
    if due is not None:
        Schedule.objects.filter(pk=row.pk).update(next_at=Now() - due)
        row.refresh_from_db()
    return row


def ticks():
    return list(Task.objects.order_by("id").values_list("task_path", "meta__schedule"))


# Register


def test_a_new_schedule_counts_from_its_registration():
    row = schedule()
    assert (row.pk, row.expression, row.timezone, row.is_enabled) == (NIGHTLY, "every 3600 s", "", True)
    assert timedelta(0) <= timezone.now() + HOUR - row.next_at < HOUR / 2
    daily = schedule(scheduled.hourly, every=None, cron="0 3 * * *", timezone="Europe/Berlin")
    assert (daily.expression, daily.timezone) == ("0 3 * * *", "Europe/Berlin")
    assert daily.next_at > timezone.now()


def test_to_register_again_changes_nothing_until_the_code_or_the_settings_do(settings):
    before = schedule(due=HOUR, every=None, cron="*/7 * * * *")
    Schedule.objects.update(is_enabled=False)
    assert register("default") == []
    assert Schedule.objects.get().next_at == before.next_at
    settings.TIME_ZONE = "Asia/Kolkata"
    assert register("default") == [NIGHTLY]
    row = Schedule.objects.get()
    assert (row.timezone, row.is_enabled) == ("Asia/Kolkata", False)
    assert row.next_at > timezone.now()
    assert schedule(every=60).expression == "every 60 s"


def test_schedules_of_other_backends_and_databases_are_nobodys_business_here(settings):
    ours = {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}
    dummy = {"BACKEND": f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"}
    settings.TASKS = {"default": dummy, "ours": ours, "far": {**ours, "OPTIONS": {"database": "elsewhere"}}}
    decorate(scheduled.nightly, every=HOUR)
    decorate(scheduled.hourly, every=HOUR, backend="far")
    assert known("default") == {}
    assert register("default") == []
    assert schedule(backend="ours").pk == NIGHTLY


# Enqueue


def test_a_tick_is_enqueued_and_the_next_one_counts_from_it():
    row = schedule(due=timedelta(seconds=1))
    enqueued = enqueue_due("default")
    [made] = Task.objects.all()
    assert enqueued.tasks == [made.pk]
    assert 3000 < enqueued.next_in <= 3600
    assert (made.task_path, made.status, made.meta) == (NIGHTLY, "READY", {"schedule": row.next_at.isoformat()})
    after = Schedule.objects.get()
    assert (after.next_at, after.last_at, after.last_task) == (row.next_at + HOUR, row.next_at, made.pk)
    assert enqueue_due("default").tasks == []


@pytest.mark.parametrize("options", [{"every": HOUR}, {"every": None, "cron": "0 * * * *"}], ids=["every", "cron"])
def test_what_was_missed_is_made_up_for_by_one_run(options):
    schedule(**options)
    Schedule.objects.update(next_at=F("next_at") - 24 * HOUR)
    missed = Schedule.objects.get().next_at
    for _ in range(3):
        enqueue_due("default")
    assert ticks() == [(NIGHTLY, missed.isoformat())]
    row = Schedule.objects.get()
    assert timedelta(0) < row.next_at - timezone.now() <= HOUR
    assert (row.next_at - missed) % HOUR == timedelta(0)


def test_what_is_disabled_is_skipped_and_goes_on_with_the_next_tick():
    row = schedule(due=5.5 * HOUR)
    assert Schedule.objects.disable() == 1
    assert Schedule.objects.disable() == 0
    assert enqueue_due("default") == ([], None)
    assert Schedule.objects.all().enable() == 1
    assert Schedule.objects.all().enable() == 0
    assert Schedule.objects.get().next_at == row.next_at + 6 * HOUR
    assert enqueue_due("default").tasks == []


def test_a_schedule_that_has_changed_since_it_was_read_does_not_get_an_old_date(monkeypatch):
    """As when a process with new code registers a new expression at this moment."""
    row = schedule(due=5.5 * HOUR)
    Schedule.objects.disable()
    read = schedule_module._rows

    def read_and_change(*values):
        found = read(*values)
        Schedule.objects.update(next_at=row.next_at + 9 * HOUR)
        return found

    monkeypatch.setattr(schedule_module, "_rows", read_and_change)
    assert Schedule.objects.all().enable() == 0
    assert Schedule.objects.get().next_at == row.next_at + 9 * HOUR


def test_options_of_the_function_hold(claim):
    schedule(due=HOUR, queue_name="night", priority=7, lock="night", max_attempts=4, meta={"who": "me"})
    enqueue_due("default")
    row = Task.objects.get()
    assert (row.queue, row.priority, row.lock_key, row.max_retries, row.meta["who"]) == ("night", 7, "night", 3, "me")
    assert row.status == "READY", "it was admitted"


def test_a_duplicate_is_skipped_and_told(caplog):
    caplog.set_level(logging.INFO, logger="django_pglock.tasks")
    row = schedule(due=HOUR, unique=Unique(on_conflict="raise"))
    first = registry.find(NIGHTLY).enqueue()
    assert enqueue_due("default").tasks == []
    assert f"The schedule of {NIGHTLY} enqueued no task: Task {first.id}" in caplog.text
    after = Schedule.objects.get()
    assert after.next_at > row.next_at
    assert (after.last_at, after.last_task) == (None, None)


def test_with_skip_the_one_that_is_there_stands_for_the_tick():
    schedule(due=HOUR, unique=True)
    first = registry.find(NIGHTLY).enqueue()
    assert enqueue_due("default").tasks == [int(first.id)]
    assert Task.objects.count() == 1


def test_a_tick_is_skipped_while_the_run_before_is_unfinished(claim):
    """A run that takes longer than its interval: no second one begins beside it, and none waits behind it."""
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


def test_a_tick_that_the_database_refuses_is_tried_again_and_not_in_a_hurry(receiver, caplog):
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


def test_a_tick_and_its_task_are_one_and_somebody_elses_tick_is_not_waited_for(in_threads, caplog):
    """While another transaction has the tick, nobody waits for it; when that rolls back, the tick is due again."""
    schedule(due=HOUR)
    with transaction.atomic():
        Schedule.objects.update(next_at=Now() + HOUR)
        [looked] = in_threads(lambda number: enqueue_due("default"), 1)
        assert looked.tasks == []
        assert looked.next_in > 0
        assert caplog.text == "", "it did not run into its lock_timeout"
        transaction.set_rollback(True)
    assert len(enqueue_due("default").tasks) == 1


def test_a_unique_task_in_an_open_transaction_holds_nobody_up_for_long(in_threads, caplog):
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


def test_a_worker_that_freezes_with_a_tick_loses_it():
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


def test_run_now_leaves_the_schedule_as_it_is():
    row = schedule(unique=Unique(on_conflict="raise"))
    schedule(scheduled.hourly)
    Schedule.objects.create(task_path="nobody.knows", expression="every 5 s", timezone="", next_at=Now())
    assert len(Schedule.objects.all().run_now()) == 2
    assert len(Schedule.objects.all().run_now()) == 1, "one is unique"
    assert Schedule.objects.filter(pk="nobody.knows").run_now() == []
    assert set(Task.objects.values_list("meta__schedule", flat=True)) == {None}
    assert Schedule.objects.get(pk=NIGHTLY).next_at == row.next_at


# Workers


def test_a_worker_keeps_the_schedules(worker, eventually):
    decorate(scheduled.nightly, every=0.2)
    worker()
    eventually(lambda: Effect.objects.filter(name="nightly").count() >= 4)
    made = Task.objects.order_by("id").values_list("meta__schedule", flat=True)
    assert len(set(made)) == len(made)


def test_a_tick_is_not_late_and_wakes_an_idle_worker(worker, eventually, settings):
    """Without its own alarm, and without its own way to the fetcher, it would come after ten minutes."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 600.0, "HEARTBEAT_LIMIT": 2000.0, "POLL_INTERVAL": 600.0}
    decorate(scheduled.nightly, every=0.4)
    worker(listens=False)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() >= 4)


def test_a_worker_hears_of_functions_that_are_decorated_later(worker, eventually):
    worker()
    eventually(lambda: Task.objects.count() == 0)
    decorate(scheduled.nightly, every=0.1)
    eventually(lambda: Effect.objects.filter(name="nightly").exists())
    decorate(scheduled.nightly, every=HOUR)
    eventually(lambda: Schedule.objects.filter(expression="every 3600 s").exists())


def test_a_schedule_that_fails_keeps_nobody_from_the_other_work_of_upkeep(worker, eventually, monkeypatch):
    def refuse(using):
        raise RuntimeError("no schedules today")

    decorate(scheduled.nightly, every=0.1)
    monkeypatch.setattr("django_pglock.store.schedule.enqueue_due", refuse)
    worker()
    later = tasks.record.using(run_after=timedelta(seconds=0.3)).enqueue("promoted")
    eventually(lambda: Effect.objects.filter(name="promoted").exists())
    assert Task.objects.get(pk=later.id)


@pytest.mark.parametrize(
    "step", ["promote", "open_rates", "rescue", "blocked_keys", "stray_waiters", "next_due_in", "prune_window"]
)
def test_a_step_of_upkeep_that_fails_keeps_nobody_from_the_others(claim, worker, eventually, monkeypatch, caplog, step):
    """As one that runs into its time limit in each round: the transaction of the round would end with it."""

    def fail(using, *args, **kwargs):
        with connections[using].cursor() as cursor:
            cursor.execute("SELECT 1 / 0")

    fail.__qualname__ = step
    decorate(scheduled.nightly, every=0.1)
    tasks.record.enqueue("rescued")
    claim()
    tasks.record.using(run_after=timedelta(seconds=0.3)).enqueue("promoted")
    expected = {"nightly", "promoted", "rescued"} - {{"promote": "promoted", "rescue": "rescued"}.get(step)}
    with monkeypatch.context() as patch:
        patch.setattr(upkeep, step, fail)
        running = worker()
        eventually(lambda: expected <= set(Effect.objects.values_list("name", flat=True)))
        eventually(lambda: "failed. The worker keeps trying" in caplog.text)
        assert running.upkeep.reconnects == 0
    if step != "prune_window":  # which rests for a minute when it has done its work
        eventually(lambda: "works again" in caplog.text)
    assert caplog.text.count("failed. The worker keeps trying") == 1


@pytest.mark.parametrize("step", ["promote", "prune_window"])
def test_a_session_that_ends_in_a_step_of_upkeep_is_replaced_by_one_with_our_limits(
    worker, eventually, monkeypatch, caplog, step
):
    """Django would open the next one by itself, at whatever comes next."""

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
