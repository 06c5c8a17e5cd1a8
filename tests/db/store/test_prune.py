"""Pruning deletes old finished tasks in batches, and never tasks that are unfinished or still needed."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock.errors import ConfigurationError
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store import prune
from django_pglock.store.id_range import first_id_since
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.store.prune import REFUSING_KEYS, outdated, prune_window, warn_of_references
from django_pglock.store.release import release
from django_pglock.store.settle import settle
from django_pglock.store.statements import run
from django_pglock.tasks.states import FINISHED, TaskStatus
from django_pglock.worker.parent import upkeep
from tests.db.store.endings import FAILURE, settle_one
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

EVER = 1000.0


def ago(days):
    return Now() - timedelta(days=days)


def make(status="SUCCESSFUL", *, days=EVER, **fields):
    """Make a task that was enqueued and, if it is finished, finished so many days ago."""
    dates = {"enqueued_at": ago(days), "last_attempted_at": Now(), "run_after": Now(), "worker": uuid4()}
    finished = ago(days) if status in FINISHED else None
    lock = {"lock_key": "key"} if status == "BLOCKED" else {}
    known = {"queue": "default", "backend": "default", "task_path": "tests.sample.tasks.nothing"}
    return Task.objects.create(**{**known, **dates, **lock, "status": status, "finished_at": finished, **fields})


def left():
    return set(Task.objects.values_list("pk", flat=True))


def keep(row):
    return row.pk in left()


# Ages


@pytest.mark.parametrize(
    ("status", "days", "is_kept"),
    [
        ("SUCCESSFUL", 6.9, True),
        ("SUCCESSFUL", 7.1, False),
        ("CANCELLED", 29.9, True),
        ("CANCELLED", 30.1, False),
        ("FAILED", EVER, True),
    ],
)
def test_each_status_has_its_age(status, days, is_kept):
    row = make(status, days=days)
    assert Task.objects.prune() == (not is_kept)
    assert keep(row) == is_kept


@override_settings(DJANGO_PGLOCK={"PRUNE_AFTER": {"FAILED": 0.5, "SUCCESSFUL": None}})
def test_prune_uses_the_ages_of_the_setting():
    make("FAILED", days=1)
    kept = [make("FAILED", days=0.4), make("SUCCESSFUL"), make("CANCELLED")]
    assert not outdated(Task.objects.all(), {}).exists()
    assert Task.objects.prune() == 1
    assert left() == {row.pk for row in kept}


@pytest.mark.parametrize("status", sorted(set(TaskStatus.values) - FINISHED))
def test_prune_keeps_unfinished_tasks(status):
    row = make(status, expires_at=ago(EVER), keep_result=1)
    make()
    assert Task.objects.prune(older_than=0, statuses=FINISHED) == 1
    assert left() == {row.pk}


def test_prune_keeps_an_old_task_that_has_just_finished():
    row = make(finished_at=Now())
    assert Task.objects.prune() == 0
    assert keep(row)


def test_statuses_and_ages_can_be_named():
    failed, _, young = make("FAILED", days=3), make("CANCELLED", days=3), make(days=1)
    assert Task.objects.prune(older_than=2, statuses=["CANCELLED"]) == 1
    assert left() == {failed.pk, young.pk}
    assert Task.objects.prune(older_than=0.5) == 1, "what is kept forever has to be named"
    assert left() == {failed.pk}
    assert Task.objects.prune(older_than=0.5, statuses=["FAILED"]) == 1


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        ({"statuses": ["RUNNING"]}, "RUNNING tasks cannot be pruned; only CANCELLED, FAILED, SUCCESSFUL tasks can"),
        ({"statuses": ["FAILED"]}, "keeps FAILED tasks forever; give older_than, in days"),
        ({"older_than": -1}, "older_than is -1"),
        ({"older_than": float("nan")}, "older_than is nan"),
    ],
)
def test_invalid_arguments_raise_an_error(wish, text):
    row = make("FAILED")
    with pytest.raises(ValueError, match=text):
        Task.objects.prune(**wish)
    assert keep(row)


@override_settings(DJANGO_PGLOCK={"PRUNE_AFTER": {}})
def test_prune_deletes_nothing_by_age_if_the_setting_has_no_age():
    row = make()
    assert Task.objects.prune() == 0
    with pytest.raises(ValueError, match="name the statuses"):
        Task.objects.prune(older_than=1)
    assert keep(row)


@pytest.mark.parametrize(
    "value",
    [7, {"RUNNING": 7}, {"FAILED": "7"}, {"FAILED": True}, {"FAILED": -1}, {"FAILED": float("inf")}],
)
def test_a_wrong_setting_gets_a_sentence(value):
    with (
        override_settings(DJANGO_PGLOCK={"PRUNE_AFTER": value}),
        pytest.raises(
            ConfigurationError, match=r"it must be a dict such as .* and numbers of days up to 36,525 or None"
        ),
    ):
        Task.objects.prune()


# keep_result


@pytest.mark.parametrize("ending", ["cancel", "predecessor"])
def test_a_task_that_ends_without_a_worker_has_the_expiry_date_of_its_keep_result(claim, ending):
    first = tasks.echo.enqueue(1)
    tasks.nothing.using(keep_result=60, **({"after": [first]} if ending == "predecessor" else {})).enqueue()
    if ending == "cancel":
        Task.objects.all().cancel()
    else:
        settle_one(claim()[0], Failed(FAILURE))
    without, kept = Task.objects.order_by("pk")
    assert {without.status, kept.status} <= FINISHED
    assert abs(kept.expires_at - kept.finished_at - timedelta(seconds=60)) < timedelta(seconds=1)
    assert without.expires_at is None


def test_an_atomic_task_gets_its_expiry_date(worker, eventually):
    tasks.record_atomically.using(keep_result=60).enqueue("x")
    worker()
    row = eventually(lambda: Task.objects.filter(status="SUCCESSFUL").first())
    assert abs(row.expires_at - row.finished_at - timedelta(seconds=60)) < timedelta(seconds=1)


def test_a_task_with_keep_result_is_pruned_after_that_time_at_any_age():
    kept = make(keep_result=60, expires_at=Now() + timedelta(days=1))
    make("FAILED", days=0, keep_result=0, expires_at=Now())
    assert Task.objects.prune() == 1
    assert left() == {kept.pk}
    assert Task.objects.prune(older_than=0) == 0, "its own word counts"


def test_prune_with_statuses_keeps_expired_tasks_of_other_statuses():
    row = make("FAILED", keep_result=0, expires_at=Now())
    assert Task.objects.prune(statuses=["SUCCESSFUL"]) == 0
    assert keep(row)


# Tasks that are still needed


def test_a_unique_key_stays_taken_for_its_period(claim):
    first = keyed.remind.using(keep_result=1).enqueue(1)
    [mine] = claim()
    settle("default", [(mine, Succeeded())], mine.worker)
    row = Task.objects.get()
    assert row.expires_at == row.unique_until, "else the index of dates would fill with what must not go"
    Task.objects.update(enqueued_at=ago(EVER), finished_at=ago(EVER), expires_at=ago(1))
    assert Task.objects.prune() == 0
    Task.objects.update(expires_at=None)
    assert Task.objects.prune(older_than=0) == 0
    Task.objects.update(unique_until=ago(0))
    assert Task.objects.prune() == 1
    assert keyed.remind.enqueue(1).id != first.id


def test_prune_keeps_awaited_tasks_until_their_waiters_know():
    """After a crash between the end of a task and the release of its dependents, upkeep needs its outcome."""
    awaited, waiting = make(), make("BLOCKED", waits_for=1)
    Waiter.objects.create(awaited=awaited.pk, task=waiting)
    assert Task.objects.prune() == 0
    release("default", [awaited.pk])
    assert Task.objects.prune() == 1
    assert left() == {waiting.pk}
    assert Task.objects.get().status == "READY", "not cancelled"


def test_prune_deletes_a_cancelled_task_with_its_waiter_rows():
    cancelled, awaited = make("CANCELLED", waits_for=1), make("READY")
    Waiter.objects.create(awaited=awaited.pk, task=cancelled)
    assert Task.objects.prune() == 1
    assert left() == {awaited.pk}
    assert not Waiter.objects.exists()


def test_attempts_go_with_their_task_in_the_same_statement():
    old, young = make(), make(days=0)
    for row in (old, young):
        for number in (1, 2):
            Attempt.objects.create(
                task=row, number=number, started_at=Now(), finished_at=Now(), outcome="FAILED",
                exception_path="x", traceback="x",
            )  # fmt: skip
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.prune() == 1
    assert sum("DELETE" in each["sql"] for each in queries) == 2, "what is expired, and the one window"
    assert set(Attempt.objects.values_list("task_id", flat=True)) == {young.pk}


# Batches


def test_prune_deletes_in_batches():
    for number in range(10):
        make("FAILED" if number % 3 == 0 else "SUCCESSFUL")
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.prune(batch=4) == 6
    assert sum("DELETE" in each["sql"] for each in queries) == 4, "what is expired, and three windows"
    assert Task.objects.filter(status="FAILED").count() == 4


def test_prune_window_continues_after_the_last_window():
    made = [make() for _ in range(5)]
    ages = {"SUCCESSFUL": 7.0}
    assert prune_window("default", 0, ages, batch=2) == (2, made[1].pk)
    assert prune_window("default", made[1].pk, ages, batch=2) == (2, made[3].pk)
    assert prune_window("default", made[3].pk, ages, batch=2) == (1, made[4].pk)
    assert prune_window("default", made[4].pk, ages, batch=2) == (0, 0)


def test_expired_tasks_are_pruned_in_batches():
    for status in ("READY", *["SUCCESSFUL"] * 5):
        make(status, days=0, keep_result=0, expires_at=ago(0.1))
    assert prune_window("default", 0, {}, batch=2) == (2, 0)
    assert Task.objects.prune(batch=2) == 3


def test_a_dry_run_counts_one_more_than_a_limit(monkeypatch):
    monkeypatch.setattr(prune, "MOST_COUNTED", 2)
    for _ in range(4):
        make(), make("FAILED", keep_result=0, expires_at=Now())
    assert [Task.objects.filter(status=each).prune(dry_run=True) for each in ("SUCCESSFUL", "FAILED")] == [3, 3]
    assert Task.objects.prune(dry_run=True) == 3


def test_a_dry_run_counts_and_deletes_nothing():
    make(), make("FAILED", keep_result=0, expires_at=ago(0.1)), make("FAILED")
    assert Task.objects.prune(dry_run=True, batch=2) == 2
    assert len(left()) == 3


def test_prune_deletes_only_tasks_of_the_queryset():
    make(queue="mail")
    make(queue="mail", keep_result=0, expires_at=ago(0.1))
    other = make()
    assert Task.objects.filter(queue="mail").prune() == 2
    assert left() == {other.pk}
    assert Task.objects.none().prune() == 0
    assert keep(other)


# Concurrency


def test_prune_leaves_locked_rows_for_the_next_round(locked):
    held, _ = make(), make()
    with locked(held.pk):
        assert Task.objects.prune() == 1
    assert left() == {held.pk}


def test_prune_takes_filter_values_with_braces_and_percent_signs(claim):
    make(kwargs={"shop": 1}), make(kwargs={"shop": 2})
    is_first = RawSQL("""kwargs @> '{"shop": 1}' AND kwargs::text LIKE '%%shop%%'""", (), output_field=BooleanField())
    assert Task.objects.filter(is_first).prune() == 1
    assert Task.objects.get().kwargs == {"shop": 2}


# Upkeep


def test_a_worker_prunes_without_a_command(worker, eventually, monkeypatch):
    monkeypatch.setattr(upkeep, "PRUNED_AT_ONCE", 2)
    for _ in range(5):
        make()
    make("FAILED", days=0, keep_result=0, expires_at=ago(0.1))
    young, failed = make(days=1), make("FAILED")
    worker()
    eventually(lambda: left() == {young.pk, failed.pk})


@pytest.mark.parametrize(("seconds", "place"), [(200, 0), (130, 1), (90, 2), (50, 3)])
def test_the_first_id_since_a_moment_is_above_all_that_are_a_minute_younger(seconds, place):
    ids = [make(days=age / 86400).pk for age in (100, 60, 20)]
    assert first_id_since("default", seconds) == [ids[0], *(id_ + 1 for id_ in ids)][place]


@pytest.fixture
def refer():
    """Make a table of the project that refers to a task, with a rule for the deletion of the task."""

    def refer(row, rule="DEFERRABLE INITIALLY DEFERRED"):
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE TABLE "keeps %task" ("a task" bigint REFERENCES django_pglock_task (id) {rule})')
            cursor.execute('INSERT INTO "keeps %%task" VALUES (%s)', (row.pk,))

    yield refer
    execute_sql('DROP TABLE "keeps %task" CASCADE')


def test_a_table_that_refers_to_tasks_keeps_these_tasks_and_no_others(worker, eventually, caplog, refer, monkeypatch):
    monkeypatch.setattr(upkeep, "PRUNED_AT_ONCE", 2)
    row, others = make(), [make() for _ in range(3)]
    expired = make("FAILED", days=0, keep_result=0, expires_at=ago(0.1))
    refer(row)
    worker()
    eventually(lambda: not any(keep(each) for each in (*others, expired)))
    assert caplog.text.count('Old tasks to which rows of "keeps %task" refer are not pruned') == 1
    tasks.nothing.using(run_after=timedelta(seconds=0.01)).enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL", finished_at__gt=ago(1)).exists())
    assert "lost its database connection" not in caplog.text
    assert keep(row)


@pytest.mark.parametrize("rule", ["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
def test_prune_and_delete_keep_tasks_that_other_rows_refer_to(refer, rule, caplog):
    row, others = make(), [make() for _ in range(3)]
    refer(row, rule)
    assert Task.objects.all().prune(dry_run=True) == 3
    assert Task.objects.filter(pk__in=[row.pk, others[0].pk]).delete_finished() == 1
    with transaction.atomic():
        assert Task.objects.filter(pk__in=[row.pk, others[1].pk]).delete_finished() == 1
    assert Task.objects.all().prune() == 1
    assert left() == {row.pk}
    known = set()
    for _ in range(2):
        warn_of_references("default", known)
    assert caplog.text.count("are not pruned") == 1


@pytest.mark.parametrize("rule", ["ON DELETE CASCADE", "ON DELETE SET NULL"])
def test_prune_deletes_tasks_whose_references_the_database_deletes_or_clears(refer, rule):
    refer(make(), rule)
    assert Task.objects.all().prune() == 1


def test_a_role_that_may_not_read_the_table_prunes_what_it_can(refer, caplog):
    row, other = make(), make()
    refer(row)
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE reads_nothing; GRANT ALL ON ALL TABLES IN SCHEMA public TO reads_nothing")
        cursor.execute('REVOKE ALL ON "keeps %task" FROM reads_nothing; SET ROLE reads_nothing')
        try:
            assert run("default", REFUSING_KEYS) == []
            assert prune_window("default", 0, {"SUCCESSFUL": 7}, batch=1) == (0, row.pk)
            assert prune_window("default", row.pk, {"SUCCESSFUL": 7}, batch=1) == (1, other.pk)
            assert caplog.text.count("are not deleted, because the database refuses it") == 1
        finally:
            cursor.execute("RESET ROLE; DROP OWNED BY reads_nothing; DROP ROLE reads_nothing")
    assert keep(row)


def test_no_foreign_key_of_the_package_is_checked_for_each_pruned_task():
    """These checks of one row after the other took two thirds of the time of pruning."""
    assert execute_sql("SELECT conname FROM pg_constraint WHERE confrelid = 'django_pglock_task'::regclass") == []
