"""Schedules: rows that follow the code, and ticks that become one task each, also with concurrent workers."""

from __future__ import annotations

import logging
import math
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_pglock import task
from django_pglock.backend import PostgresBackend
from django_pglock.models import Schedule, Task
from django_pglock.store import schedules
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.store.rescue import rescue
from django_pglock.store.schedules import ScheduleKeeper, known, last_runs
from django_pglock.store.settle import settle
from django_pglock.tasks import registry
from django_pglock.tasks.compat import BaseTaskBackend, task_backends, task_enqueued
from django_pglock.tasks.options import Unique
from tests.conftest import NEVER
from tests.db.store.endings import FAILURE
from tests.db.store.schedules import HOUR, HOURLY, NIGHTLY, decorate, enqueue_due, of_code, register, schedule, ticks
from tests.sample import scheduled
from tests.sql import execute_sql

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


# Registration


def test_a_new_schedule_counts_from_its_registration():
    row = schedule()
    assert (row.pk, row.expression, row.timezone, row.is_enabled) == (NIGHTLY, "every 3600 s", "", True)
    assert timedelta(0) <= timezone.now() + HOUR - row.next_at < HOUR / 2
    daily = schedule(scheduled.hourly, every=None, cron="0 3 * * *", timezone="Europe/Berlin")
    assert (daily.expression, daily.timezone) == ("0 3 * * *", "Europe/Berlin")
    assert daily.next_at > timezone.now()


def test_a_schedule_that_has_not_changed_is_not_locked(session):
    """A worker starts also while a tick, or a person, holds the row."""
    schedule(), schedule(scheduled.hourly)
    session.set_autocommit(False)
    with session.cursor() as other, connection.cursor() as cursor:
        other.execute("SELECT FROM django_pglock_schedule FOR UPDATE")
        cursor.execute("SET lock_timeout = '1s'")
        register()
        other.execute("ROLLBACK")


def test_registering_a_schedule_again_changes_it_only_with_code_or_settings(settings):
    before = schedule(due=HOUR, every=None, cron="*/7 * * * *")
    Schedule.objects.update(is_enabled=False)
    register()
    assert Schedule.objects.get().next_at == before.next_at
    settings.TIME_ZONE = "Asia/Kolkata"
    register()
    row = Schedule.objects.get()
    assert (row.timezone, row.is_enabled) == ("Asia/Kolkata", False)
    assert row.next_at > timezone.now()
    assert schedule(every=60).expression == "every 60 s"


def test_two_schedules_may_call_one_function_and_only_that_with_its_name_follows_the_code():
    """Each has a name, and its ticks are its own."""
    schedule(due=timedelta(minutes=1))
    Schedule.objects.create(name="each minute", task_path=NIGHTLY, expression="every 60 s")
    keeper = ScheduleKeeper("default")
    keeper.keep()
    Schedule.objects.update(next_at=Now() - HOUR)
    made = keeper.keep().tasks
    assert len(made) == 2
    assert sorted(Schedule.objects.values_list("last_task", flat=True)) == sorted(made)
    assert dict(Schedule.objects.values_list("pk", "expression")) == {
        NIGHTLY: "every 3600 s",
        "each minute": "every 60 s",
    }
    Schedule.objects.filter(pk="each minute").update(next_at=Now())
    [third] = keeper.keep().tasks
    before = Task.objects.get(pk=third).meta["previous_run"]
    assert Task.objects.get(pk=before).meta["schedule"] < Task.objects.get(pk=third).meta["schedule"]
    assert before in made


@pytest.mark.parametrize(
    ("options", "ahead", "is_brought_near"),
    [
        ({"every": 60}, timedelta(minutes=5), True),
        ({"every": 60}, timedelta(seconds=59), False),
        ({"every": None, "cron": "* * * * *"}, timedelta(minutes=5), False),
    ],
    ids=str,
)
def test_an_interval_begins_again_after_the_servers_clock_was_put_back(options, ahead, is_brought_near):
    """As by a failover to a host whose clock is behind. A tick of cron has a date, and has run."""
    schedule(**options)
    Schedule.objects.update(next_at=Now() + ahead)
    before = Schedule.objects.get().next_at
    register()
    after = Schedule.objects.get().next_at
    assert (after != before) is is_brought_near
    assert after - timezone.now() <= (timedelta(minutes=1) if is_brought_near else ahead)


# Which schedules belong to a database


def test_schedules_of_other_backends_and_databases_are_not_changed(settings):
    ours = {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}
    dummy = {"BACKEND": f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"}
    settings.TASKS = {"default": dummy, "ours": ours, "far": {**ours, "OPTIONS": {"database": "elsewhere"}}}
    decorate(scheduled.nightly, every=HOUR)
    decorate(scheduled.hourly, every=HOUR, backend="far")
    assert known("default") == {}
    register()
    assert not Schedule.objects.exists()
    assert schedule(backend="ours").pk == NIGHTLY


@pytest.mark.parametrize("column", ["next_at", "last_at"])
@pytest.mark.parametrize("date", ["infinity", "-infinity", "10000-01-01"])
def test_a_date_that_python_does_not_have_is_refused(column, date):
    """It would stop all schedules: the statement that reads the dates that are due would fail."""
    decorate(scheduled.nightly, every=HOUR)
    register()
    with pytest.raises(IntegrityError, match="pglock_schedule_dates"), connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_pglock_schedule SET {column} = '{date}'")


# Ticks


def test_a_tick_is_enqueued_and_the_next_one_counts_from_it(monkeypatch):
    row = schedule(due=timedelta(seconds=1))
    with monkeypatch.context() as slow:
        slow.setattr(schedules, "time", SimpleNamespace(monotonic=iter((0.0, 0.0, 1800.0)).__next__))
        enqueued = enqueue_due()
    [made] = Task.objects.all()
    assert enqueued.tasks == [made.pk]
    assert 1200 < enqueued.next_in <= 1800
    assert (made.task_path, made.status, made.meta) == (
        *(NIGHTLY, "READY"),
        {"schedule": row.next_at.isoformat(), "keeps_failures": True},
    )
    after = Schedule.objects.get()
    assert (after.next_at, after.last_at, after.last_task) == (row.next_at + HOUR, row.next_at, made.pk)
    assert enqueue_due().tasks == []


def test_ticks_are_refused_within_a_transaction():
    """A tick that fails would undo the others, and each tick would be kept back until the end."""
    schedule(due=timedelta(seconds=1))
    with transaction.atomic(), pytest.raises(RuntimeError, match="durable"):
        enqueue_due()


@pytest.mark.parametrize("options", [{"every": HOUR}, {"every": None, "cron": "0 * * * *"}], ids=["every", "cron"])
def test_missed_ticks_are_replaced_by_one_run(options):
    schedule(**options)
    Schedule.objects.update(next_at=F("next_at") - 24 * HOUR)
    missed = Schedule.objects.get().next_at
    for _ in range(3):
        enqueue_due()
    assert ticks() == [(NIGHTLY, missed.isoformat())]
    row = Schedule.objects.get()
    assert timedelta(0) < row.next_at - timezone.now() <= HOUR
    assert (row.next_at - missed) % HOUR == timedelta(0)


def test_a_tick_whose_task_is_a_duplicate_is_skipped_and_logged(caplog):
    caplog.set_level(logging.INFO, logger="django_pglock.tasks")
    row = schedule(due=HOUR, unique=Unique(on_conflict="raise"))
    first = registry.find(NIGHTLY).enqueue()
    assert enqueue_due().tasks == []
    assert f"The schedule of {NIGHTLY} enqueued no task: Task {first.id}" in caplog.text
    after = Schedule.objects.get()
    assert after.next_at > row.next_at
    assert (after.last_at, after.last_task) == (None, None)


def test_a_tick_is_skipped_while_the_run_before_is_unfinished(claim):
    """While a run takes longer than the interval, no other run of the schedule begins or is enqueued."""
    schedule(due=3 * HOUR, unique=Unique(while_="unfinished"))
    [first] = enqueue_due().tasks
    claim()
    Schedule.objects.update(next_at=Now())
    assert enqueue_due().tasks == [first]
    assert list(Task.objects.values_list("pk", "status")) == [(first, "RUNNING")]
    Task.objects.update(status="SUCCESSFUL", finished_at=Now())
    Schedule.objects.update(next_at=Now())
    assert enqueue_due().tasks != [first]


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
    assert len(enqueue_due().tasks) == 1
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
    looked = enqueue_due()
    assert [path for path, _ in ticks()] == [HOURLY]
    assert "The worker tries again: the disk is full" in caplog.text
    assert looked.next_in > 0
    assert Schedule.objects.get(pk=NIGHTLY).next_at == row.next_at
    task_enqueued.disconnect(fail)
    assert len(enqueue_due().tasks) == 1


@pytest.mark.parametrize("expression", ["when it rains", "every", "every time", "every 1e999 s", "every 0 s"])
def test_a_schedule_that_cannot_be_read_stops_no_other(expression, caplog):
    schedule(due=HOUR)
    schedule(scheduled.hourly, due=HOUR)
    Schedule.objects.filter(pk=NIGHTLY).update(expression=expression, versions=["every 3600 s"])
    keeper, tasks = ScheduleKeeper("default"), known("default")
    for _ in range(2):
        keeper.register(tasks, schedules._read_rows("default", tasks))
        assert Schedule.objects.get(pk=NIGHTLY).expression == expression
        keeper.enqueue_due(tasks, schedules._read_rows("default", tasks))
    assert [path for path, _ in ticks()] == [HOURLY]
    assert caplog.text.count(f"{expression!r} in '', cannot be read") == 1


def test_a_tick_and_its_task_commit_together_and_a_locked_tick_causes_no_wait(in_threads, caplog):
    """While another transaction locks the tick, other workers skip it. After a rollback the tick is due again."""
    schedule(due=HOUR)
    with transaction.atomic():
        Schedule.objects.update(next_at=Now() + HOUR)
        [looked] = in_threads(lambda number: enqueue_due(), 1)
        assert looked.tasks == []
        assert looked.next_in > 0
        assert caplog.text == "", "it did not run into its lock_timeout"
        transaction.set_rollback(True)
    assert len(enqueue_due().tasks) == 1


def test_a_unique_task_in_an_open_transaction_delays_a_tick_only_briefly(in_threads, caplog):
    schedule(due=HOUR, unique=True)
    with transaction.atomic():
        registry.find(NIGHTLY).enqueue()
        [looked] = in_threads(lambda number: enqueue_due(), 1)
        transaction.set_rollback(True)
    assert looked.tasks == []
    assert "lock timeout" in caplog.text
    assert len(enqueue_due().tasks) == 1


def test_enqueue_due_limits_the_idle_time_of_its_transaction():
    seen = []

    def look(sender, **kwargs):
        seen.append(execute_sql("SHOW idle_in_transaction_session_timeout")[0][0])

    schedule(due=HOUR)
    task_enqueued.connect(look)
    try:
        enqueue_due()
    finally:
        task_enqueued.disconnect(look)
    assert seen == ["10s"]


@pytest.fixture
def many():
    """Return a function that makes schedules of many functions due, all of which have the same options."""

    def make(count, **options):
        for number in range(count):

            def function(number=number): ...

            function.__module__, function.__qualname__ = scheduled.__name__, f"each_{number:03}"
            decorate(function, **{"every": HOUR, **options})
        register()
        Schedule.objects.update(next_at=Now() - timedelta(minutes=1))

    return make


ALL_KINDS = [
    {},
    {"lock": "each:{number}"},
    {"unique": True},
    {"rate": "1000/s"},
    {"fair": "each:{number}", "keep_result": 5},
    {"every": None, "cron": "0 * * * *"},
]


@pytest.mark.parametrize("options", ALL_KINDS, ids=str)
def test_many_due_ticks_are_few_transactions_of_few_statements(many, options):
    """200 at a time. Only the calls of unique tasks are written one by one."""
    many(300, **options)
    keeper = ScheduleKeeper("default")
    with CaptureQueriesContext(connection) as queries:
        first, second = keeper.keep(), keeper.keep()
    enqueued = {*first.tasks, *second.tasks}
    assert [query["sql"] for query in queries].count("COMMIT") == 2
    assert len(queries) <= 0.1 * 300 + ("unique" in options) * 300
    assert (len(enqueued), first.next_in) == (300, 0)
    assert len(set(ticks())) == 300
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}
    assert set(Schedule.objects.values_list("last_task", flat=True)) == enqueued
    assert keeper.keep().tasks == []


def test_ticks_of_functions_with_different_options_are_written_together():
    """A column that one of them has not is as a row of its own would have it."""
    schedule(due=HOUR, lock="nightly", priority=3, max_attempts=4, keep_result=5)
    schedule(scheduled.hourly, due=HOUR, fair="hourly", meta={"trace": "a"})
    with CaptureQueriesContext(connection) as queries:
        assert len(enqueue_due().tasks) == 2
    assert len([query for query in queries if query["sql"].startswith("INSERT")]) == 1
    nightly, hourly = Task.objects.order_by("task_path").reverse()
    assert (nightly.lock_key, nightly.priority, nightly.max_retries, nightly.keep_result) == ("nightly", 3, 3, 5)
    assert (nightly.status, nightly.fair_key) == ("READY", None)
    assert (hourly.status, hourly.lock_key, hourly.fair_key, hourly.concurrency) == ("READY", None, "hourly", None)
    assert (hourly.meta["trace"], hourly.run_after, hourly.unique_key) == ("a", None, None)


def test_ticks_may_have_percent_signs_beside_an_execute_wrapper_that_adds_parameters(many):
    """The lock key of a task with a rate begins with one."""
    many(2, rate="1000/s")
    with connection.execute_wrapper(lambda execute, sql, params, *others: execute(sql, params or (), *others)):
        assert len(ScheduleKeeper("default").keep().tasks) == 2


def test_ticks_ask_the_rules_of_a_backend_of_the_projects_own(many, monkeypatch):
    class Strict(PostgresBackend):
        def enqueue(self, task, args, kwargs):
            asked.append(task.module_path)
            return super().enqueue(task, args, kwargs)

    asked = []
    monkeypatch.setattr(task_backends["default"], "__class__", Strict)
    many(3)
    assert len(ScheduleKeeper("default").keep().tasks) == len(asked) == 3


def test_a_tick_that_fails_among_many_stops_no_other_however_often(many, receiver, caplog, monkeypatch):
    monkeypatch.setattr(schedules, "TIME_FOR_TICKS", NEVER)
    many(20)
    receiver(f"{scheduled.__name__}.each_007", OperationalError("the disk is full"))
    keeper = ScheduleKeeper("default")
    assert len(keeper.keep().tasks) == 19
    Schedule.objects.update(next_at=Now() - timedelta(seconds=1))
    with CaptureQueriesContext(connection) as queries:
        assert len(keeper.keep().tasks) == 19
    assert [query["sql"] for query in queries].count("COMMIT") == 1, "the others are together again"
    assert caplog.text.count("The worker tries again: the disk is full") == 2


# Enable and disable


def test_a_disabled_schedule_is_skipped_and_continues_with_the_next_tick():
    row = schedule(due=5.5 * HOUR)
    assert Schedule.objects.disable() == 1
    assert Schedule.objects.disable() == 0
    assert enqueue_due() == ([], None)
    assert Schedule.objects.all().enable() == 1
    assert Schedule.objects.all().enable() == 0
    assert Schedule.objects.get().next_at == row.next_at + 6 * HOUR
    assert enqueue_due().tasks == []


def test_enabling_a_schedule_tells_the_parents_of_idle_workers(monkeypatch):
    schedule()
    Schedule.objects.disable()
    told = []
    monkeypatch.setattr(schedules, "wake_parents", told.append)
    Schedule.objects.all().enable()
    assert told == ["default"]


# Run now


def test_run_now_leaves_the_schedule_as_it_is():
    row = schedule(unique=Unique(on_conflict="raise"))
    schedule(scheduled.hourly)
    of_code("nobody.knows")
    assert len(Schedule.objects.all().run_now()) == 2
    assert len(Schedule.objects.all().run_now()) == 1, "one is unique"
    assert Schedule.objects.filter(pk="nobody.knows").run_now() == []
    assert set(Task.objects.values_list("meta__schedule", flat=True)) == {None}
    assert Schedule.objects.get(pk=NIGHTLY).next_at == row.next_at


# The last runs: a chain of the tasks that its ticks have enqueued


@pytest.fixture
def nightly():
    task(every=3600)(scheduled.nightly)
    register()
    return Schedule.objects.get()


def tick():
    """Make one tick due and enqueue it. Returns the id of its task."""
    Schedule.objects.update(next_at=Now() - timedelta(seconds=1))
    [id_] = enqueue_due().tasks
    return id_


def ids(schedule, **limit):
    schedule.refresh_from_db()
    return [each.pk for each in last_runs("default", schedule.pk, schedule.last_task, **limit)]


def test_the_runs_are_those_of_the_ticks_the_newest_first(nightly, django_assert_max_num_queries):
    assert ids(nightly) == []
    first, second = tick(), tick()
    Schedule.objects.all().run_now()
    third = tick()
    with django_assert_max_num_queries(3):
        assert [each.pk for each in last_runs("default", nightly.pk, third)] == [third, second, first]
    assert ids(nightly) == [third, second, first]
    assert ids(nightly, limit=2) == [third, second]


def test_the_chain_ends_at_a_task_that_is_deleted(nightly):
    ticks = [tick() for _ in range(4)]
    assert ids(nightly, limit=3) == ticks[:0:-1]
    Task.objects.filter(pk=ticks[1]).delete()
    assert ids(nightly) == [ticks[3], ticks[2]]
    Task.objects.filter(pk=ticks[3]).delete()
    assert ids(nightly) == []


@pytest.mark.parametrize("text", ["x", -1, 1.5, True, None, [], {}, "9" * 40, "own", "later", "other"])
def test_an_invalid_previous_run_ends_the_list_of_runs(nightly, text):
    first = tick()
    other = Task.objects.create(queue="default", backend="default", task_path="some.other")
    last = tick()
    named = {"own": last, "later": last + 10, "other": other.pk}
    Task.objects.filter(pk=last).update(meta={"previous_run": named[text] if str(text) in named else text})
    assert ids(nightly) == [last]
    Task.objects.filter(pk=last).update(meta=[])
    assert ids(nightly) == [last]
    Task.objects.filter(pk=last).update(meta={"previous_run": str(first)})
    assert ids(nightly) == [last, first]


# The status of the last task


# Keeping


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"every": 2}, 3600),
        ({"every": 600}, 60_000),
        ({"every": None, "cron": "*/20 8-10 * * *"}, 120_000),
        # By PRUNE_AFTER, which is sooner.
        ({"every": 86_400}, None),
        ({"every": None, "cron": "0 3 * * *"}, None),
        ({"every": 2, "keep_result": timedelta(minutes=1)}, 60),
    ],
)
def test_successful_runs_of_a_schedule_are_kept_for_a_hundred_ticks(claim, options, kept):
    """Otherwise every=2 would keep 43,200 rows of a day, and the rows of a week."""
    schedule(due=timedelta(seconds=1), **options)
    enqueue_due()
    [run] = claim()
    settle("default", [(run, Succeeded())], run.worker)
    row = Task.objects.get()
    assert row.keep_result == kept
    assert (row.expires_at and round((row.expires_at - row.finished_at).total_seconds())) == kept


@pytest.mark.parametrize(("options", "expires"), [({}, False), ({"keep_result": 60}, True)])
@pytest.mark.parametrize("ending", ["failed", "rescued"])
def test_failed_runs_of_a_schedule_stay_as_other_failed_tasks_do(claim, options, expires, ending, settings):
    settings.DJANGO_PGLOCK = {"MAX_RESCUES": 0}
    schedule(due=timedelta(seconds=1), **{"every": 2, **options})
    enqueue_due()
    [run] = claim()
    if ending == "failed":
        settle("default", [(run, Failed(FAILURE))], run.worker)
    else:
        # A worker without a row is dead.
        rescue("default", unbroken=math.inf)
    row = Task.objects.get()
    assert (row.status, row.expires_at is not None) == ("FAILED", expires)


def test_a_project_that_keeps_successful_tasks_for_ever_keeps_all_runs(settings):
    settings.DJANGO_PGLOCK = {"PRUNE_AFTER": {"SUCCESSFUL": None}}
    schedule(due=timedelta(seconds=1), every=2)
    enqueue_due()
    assert Task.objects.get().keep_result is None
