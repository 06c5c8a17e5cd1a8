"""The archive: what moves, when, with what; what stays; and what of it is found again."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.utils import timezone as django_timezone

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import ArchivedTask, Attempt, Task, Waiter
from django_pglock.store import archive, archive_days
from django_pglock.store import archive_state as archive_state_module
from django_pglock.store.archive import COLUMNS, archive_window
from django_pglock.store.archive_days import create_days, drop_days, sizes_of_days
from django_pglock.store.archive_state import archive_state, may_be_archived, table_of, turn_off, turn_on
from django_pglock.store.archived import failures_of
from django_pglock.store.release import release
from django_pglock.tasks.compat import TaskResultDoesNotExist
from tests.db.store.test_prune import ago, make
from tests.sample import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]
TWO_HOURS = 2 / 24


def walk(days=7.0, batch=1000):
    """Walk once through all tasks; return how many were moved."""
    count, after = 0, 0
    while True:
        moved, after = archive_window("default", after, days, batch=batch)
        count += moved
        if not after:
            return count


def moved(*rows):
    """Return which of these tasks are in the archive, after a look that none is in both tables or in none."""
    archived = set(ArchivedTask.objects.values_list("pk", flat=True))
    assert archived.isdisjoint(Task.objects.values_list("pk", flat=True))
    return [row.pk in archived for row in rows]


def fail(row, number, **fields):
    known = {"worker": uuid4(), "worker_name": "w", "started_at": Now(), "finished_at": Now(), "outcome": "FAILED"}
    texts = {"exception_path": "builtins.ValueError", "traceback": f"Traceback {number}", "log": "a\nb"}
    return Attempt.objects.create(task=row, number=number, **{**known, **texts, **fields})


# What moves


def test_tasks_that_have_succeeded_move_an_hour_after_their_end():
    old, young = make(days=TWO_HOURS), make(days=0.5 / 24)
    others = [make(status, days=TWO_HOURS) for status in ("FAILED", "CANCELLED", "READY", "RUNNING", "BLOCKED")]
    just_ended = make(days=TWO_HOURS, finished_at=Now())
    assert walk() == 1
    assert moved(old) == [True]
    assert not any(moved(young, just_ended, *others))


def test_each_column_moves_with_its_task():
    values = {
        "queue": "mail",
        "priority": 7,
        "args": [1, {"a": "b"}],
        "kwargs": {"c": None},
        "backend": "other",
        "retries": 2,
        "max_retries": 5,
        "attempts": 4,
        "uncounted": 1,
        "rescues": 1,
        "lock_key": "l",
        "concurrency": 3,
        "group_key": "g",
        "fair_key": "f",
        "unique_key": "u",
        "unique_scope": "UNFINISHED",
        "cancel_requested_at": ago(1),
        "started_at": ago(1),
        "progress": [1, 2],
        "result": {"r": [1]},
        "log": "x\ny",
        "meta": {"m": 1},
    }
    row = make(days=TWO_HOURS, **values)
    row.refresh_from_db()
    assert walk() == 1
    found = ArchivedTask.objects.get(pk=row.pk)
    names = COLUMNS.split(", ")
    assert {name: getattr(found, name) for name in names} == {name: getattr(row, name) for name in names}
    assert (found.name, found.attempts_made, str(found)) == (row.name, row.attempts_made, str(row))
    assert "finished" in repr(found)
    columns = {field.attname for field in ArchivedTask._meta.concrete_fields}
    assert {*names, "failed_attempts"} == columns


def test_the_columns_that_stay_behind_are_those_of_unfinished_failed_or_kept_tasks():
    """A new column of Task has to be added to the archive, or to this list."""
    ours = {field.attname for field in Task._meta.concrete_fields}
    assert ours - set(COLUMNS.split(", ")) == {
        *("expires_at", "fingerprint", "keep_result", "unique_scope", "unique_until", "waits_for")
    }


def test_failed_attempts_move_with_their_task():
    row, other = make(days=TWO_HOURS, attempts=3), make(days=TWO_HOURS, attempts=1)
    _, first = fail(row, 2, outcome="LOST", worker=None, log=None), fail(row, 1)
    stays = fail(make("FAILED"), 1)
    dates = list(row.failures.order_by("number").values_list("started_at", "finished_at"))
    assert walk() == 2
    assert list(Attempt.objects.all()) == [stays]
    found = ArchivedTask.objects.get(pk=row.pk).failed_attempts
    assert [each["number"] for each in found] == [1, 2]
    assert found[0]["worker"] == str(first.worker)
    assert found[1] == {
        "number": 2, "worker": None, "worker_name": "w", "outcome": "LOST", "exception_path": "builtins.ValueError",
        "traceback": "Traceback 2", "log": None, "started_at": found[1]["started_at"],
        "finished_at": found[1]["finished_at"],
    }  # fmt: skip
    assert ArchivedTask.objects.get(pk=other.pk).failed_attempts is None
    assert [(each.started_at, each.finished_at) for each in failures_of(ArchivedTask.objects.get(pk=row.pk))] == dates


def test_tasks_that_are_still_needed_stay():
    kept = make(days=TWO_HOURS, keep_result=60, expires_at=Now() + timedelta(days=1))
    taken = make(days=TWO_HOURS, unique_key="u", unique_scope="PERIOD", unique_until=Now() + timedelta(days=1))
    awaited, waiting = make(days=TWO_HOURS), make("BLOCKED", waits_for=1)
    Waiter.objects.create(awaited=awaited.pk, task=waiting)
    assert walk() == 0
    assert not any(moved(kept, taken, awaited))
    release("default", [awaited.pk])
    Task.objects.filter(pk=taken.pk).update(unique_until=Now())
    assert walk() == 2
    assert moved(kept, taken, awaited) == [False, True, True]
    assert Task.objects.get(pk=waiting.pk).status == "READY"


def test_a_task_that_others_wait_for_since_it_was_locked_stays(monkeypatch):
    """The statement that locks the rows has an older snapshot than the one that moves them."""
    row = make(days=TWO_HOURS)
    message = archive.run_together

    def wait_meanwhile(using, *parts):
        [waiter] = Waiter.objects.bulk_create([Waiter(awaited=row.pk)])
        late = (f"{parts[1][0]}; INSERT INTO {{waiter}} (awaited) VALUES ({row.pk})", parts[1][1])
        waiter.delete()
        return message(using, parts[0], late, parts[2])

    monkeypatch.setattr(archive, "run_together", wait_meanwhile)
    assert walk() == 0
    assert moved(row) == [False]


def test_tasks_that_pruning_deletes_do_not_move():
    too_old, old = make(days=8), make(days=6)
    assert walk(days=7) == 1
    assert moved(too_old, old) == [False, True]
    assert walk(days=None) == 1
    assert moved(too_old) == [True]


def test_locked_tasks_move_later(locked):
    held, free = make(days=TWO_HOURS), make(days=TWO_HOURS)
    with locked(held.pk):
        assert walk() == 1
        assert moved(held, free) == [False, True]
    assert walk() == 1


def test_the_walk_goes_from_window_to_window_and_ends_where_all_are_young():
    for status in ("FAILED", "SUCCESSFUL", "SUCCESSFUL", "SUCCESSFUL", "SUCCESSFUL"):
        make(status, days=TWO_HOURS)
    young = [make("READY", days=0).pk for _ in range(6)]
    first = min(Task.objects.values_list("pk", flat=True))
    assert archive_window("default", 0, 7.0, batch=2) == (1, first + 1)
    assert archive_window("default", first + 1, 7.0, batch=2) == (2, first + 3)
    assert archive_window("default", first + 3, 7.0, batch=2) == (1, first + 5)
    assert archive_window("default", first + 5, 7.0, batch=2) == (0, 0)
    assert set(Task.objects.values_list("pk", flat=True)) == {first, *young}


# Days


def utc(*numbers):
    return datetime(*numbers, tzinfo=timezone.utc)


def test_each_day_has_a_partition_by_utc(settings):
    settings.TIME_ZONE = "America/New_York"
    day = (django_timezone.now() - timedelta(days=3)).astimezone(timezone.utc).date()
    last, first = (utc(day.year, day.month, day.day, 23, 59, 59), utc(day.year, day.month, day.day) + timedelta(days=1))
    make(days=5, finished_at=last), make(days=5, finished_at=first)
    assert walk() == 2
    assert archive_state("default").days == (day, day + timedelta(days=1))
    with connection.cursor() as cursor:
        for each in (day, day + timedelta(days=1)):
            cursor.execute(f"SELECT count(*) FROM {table_of(each)}")
            assert cursor.fetchone() == (1,)


def test_old_days_are_dropped_and_others_stay():
    for days in (9, 3, TWO_HOURS):
        make(days=days)
    assert walk(days=30) == 3
    before = archive_state("default").days
    assert drop_days("default", 7) == [before[0]]
    assert archive_state("default").days == before[1:]
    assert ArchivedTask.objects.count() == 2
    assert drop_days("default", 7) == []


def test_a_day_is_dropped_only_when_all_its_tasks_are_old_enough():
    """Its first task may be older by a day."""
    make(days=7 + TWO_HOURS)
    walk(days=30)
    [day] = archive_state("default").days
    ends = utc(day.year, day.month, day.day) + timedelta(days=1)
    age = (django_timezone.now() - ends) / timedelta(days=1)
    assert drop_days("default", age + 1) == []
    assert drop_days("default", max(0, age - 1)) == [day]


def test_an_interrupted_drop_is_finished(monkeypatch):
    for days in (9, 10):
        make(days=days)
    walk(days=30)
    monkeypatch.setattr(archive_days, "DROP", archive_days.sql.SQL("SELECT 1/0 -- {part}"))
    with pytest.raises(Exception, match="division by zero"):
        drop_days("default", 7)
    monkeypatch.undo()
    assert len(archive_state("default").days) == 1
    assert len(drop_days("default", 7)) == 2
    assert drop_days("default", 7) == []
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_class WHERE relname ~ '^django_pglock_archivedtask_2'")
        assert cursor.fetchone() == (0,)


def test_a_partition_that_a_person_has_detached_is_kept():
    row = make(days=9)
    walk(days=30)
    [day] = archive_state("default").days
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE django_pglock_archivedtask DETACH PARTITION {table_of(day)}")
        assert drop_days("default", 1) == []
        cursor.execute(f"SELECT id FROM {table_of(day)}")
        assert cursor.fetchone() == (row.pk,)
        # Other tasks of this day stay in the table of tasks: their table is not a partition.
        late = make(days=9)
        assert walk(days=30) == 0
        assert moved(late) == [False]
        cursor.execute(f"DROP TABLE {table_of(day)}")


def test_sizes_are_those_of_the_statistics():
    for _ in range(3):
        make(days=TWO_HOURS)
    walk()
    [day] = sizes_of_days("default")
    assert day.rows is None
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_archivedtask")
    [day] = sizes_of_days("default")
    assert day.rows == 3
    assert day.size > 8192


def test_two_create_the_same_day(in_threads):
    day = django_timezone.now().date()
    states = in_threads(lambda _: create_days("default", [day]), 4)
    assert {state.days for state in states} == {(day,)}


# The switch


def test_the_switch_is_seen_by_all(monkeypatch):
    assert not archive_state("default").is_on
    assert not may_be_archived("default")
    turn_on("default")
    state = archive_state("default")
    assert 0 <= state.on_for < 600
    assert state.may_have_rows
    turn_off("default")
    assert not archive_state("default").is_on
    assert not archive_state("default").may_have_rows
    create_days("default", [django_timezone.now().date()])
    assert archive_state("default").may_have_rows


# Afterwards


def test_the_result_of_a_moved_task_is_read_from_the_archive(claim, django_assert_num_queries):
    result = tasks.echo.enqueue(7)
    row = make(days=TWO_HOURS, task_path=tasks.echo.module_path, args=[7], attempts=2, result={"answer": 7})
    fail(row, 1)
    expected = tasks.echo.get_result(str(row.pk))
    turn_on("default")
    assert walk() == 1
    with django_assert_num_queries(2):
        found = tasks.echo.get_result(str(row.pk))
    assert found.return_value == {"answer": 7}
    assert found == expected
    assert found.task.max_attempts == row.max_retries + 1
    assert [error.traceback for error in found.errors] == ["Traceback 1"]
    assert found.worker_ids == expected.worker_ids
    found.refresh()
    assert found.wait(5).is_finished
    assert tasks.echo.get_result(result.id).status == "READY"


@pytest.mark.parametrize("is_many", [False, True])
def test_a_task_can_be_enqueued_after_one_in_the_archive(is_many):
    old, other = make(days=TWO_HOURS), make("READY", days=0, run_after=None)
    turn_on("default")
    assert walk() == 1

    def enqueue(*awaited):
        call = tasks.echo.using(after=awaited)
        return int(enqueue_many(call, [1])[0] if is_many else call.enqueue(1).id)

    both, alone = Task.objects.get(pk=enqueue(old.pk, other.pk)), Task.objects.get(pk=enqueue(old.pk))
    assert (both.status, both.waits_for, both.meta["after"]) == ("BLOCKED", 1, [old.pk, other.pk])
    assert (alone.status, alone.waits_for, alone.meta["after"]) == ("READY", 0, [old.pk])
    with pytest.raises(TaskOptionError, match="names a task that does not exist: 999999"):
        enqueue(old.pk, 999999)


def test_a_role_that_may_not_read_the_archive_is_not_refused():
    row = make(days=TWO_HOURS)
    turn_on("default")
    walk()
    with connection.cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS without_archive")
        cursor.execute("CREATE ROLE without_archive")
        cursor.execute("GRANT SELECT ON django_pglock_task TO without_archive")
        cursor.execute("SET ROLE without_archive")
        archive_state_module._known.clear()
        try:
            with pytest.raises(TaskResultDoesNotExist):
                tasks.echo.get_result(str(row.pk))
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY without_archive")
            cursor.execute("DROP ROLE without_archive")
