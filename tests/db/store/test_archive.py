"""The archive: which tasks and rows move there, and when."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import ArchivedTask, Attempt, Task, Waiter
from django_pglock.store import archive
from django_pglock.store.archive import COLUMNS, archive_window
from django_pglock.store.archive_state import archive_state
from django_pglock.store.attempts import failures_of
from django_pglock.store.release import release
from tests.db.store.archiving import TWO_HOURS, fail, moved, walk
from tests.db.store.test_prune import ago, make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


def test_tasks_that_have_succeeded_move_an_hour_after_their_end():
    old, young = make(days=TWO_HOURS), make(days=0.5 / 24)
    others = [make(status, days=TWO_HOURS) for status in ("FAILED", "CANCELLED", "READY", "RUNNING", "BLOCKED")]
    just_ended = make(days=TWO_HOURS, finished_at=Now())
    assert walk() == 1
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM pg_settings WHERE source = 'session' AND setting IN ('off', '1000', '3000')")
        assert cursor.fetchall() == [], "the limits end with the transaction"
    assert moved(old) == [True]
    assert not any(moved(young, just_ended, *others))
    assert archive_window("default", 0, None, age=60.0)[0] == 1
    assert moved(young, just_ended) == [True, False]


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


def test_no_partition_is_created_for_a_day_of_which_no_task_moves():
    make(days=3, keep_result=60, expires_at=Now() + timedelta(days=1))
    make("FAILED", days=3)
    make(days=8)
    make(days=0)
    make(days=TWO_HOURS, finished_at=Now())
    assert walk(days=7) == 0
    assert archive_state("default").days == ()
    make(days=TWO_HOURS)
    assert walk(days=7) == 1
    assert len(archive_state("default").days) == 1


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


def test_archiving_moves_window_by_window_and_ends_at_recent_tasks():
    for status in ("FAILED", "FAILED", "FAILED", "SUCCESSFUL", "SUCCESSFUL", "SUCCESSFUL", "SUCCESSFUL"):
        make(status, days=TWO_HOURS)
    young = [make("READY", days=0).pk for _ in range(6)]
    first = min(Task.objects.values_list("pk", flat=True))
    assert archive_window("default", 0, 7.0, batch=2) == (0, first + 1)
    assert archive_window("default", first + 3, 7.0, batch=2) == (2, first + 5)
    assert archive_window("default", first + 1, 7.0, batch=2) == (1, first + 3)
    assert archive_window("default", first + 5, 7.0, batch=2) == (1, first + 7)
    assert archive_window("default", first + 7, 7.0, batch=2) == (0, 0)
    assert set(Task.objects.values_list("pk", flat=True)) == {first, first + 1, first + 2, *young}
