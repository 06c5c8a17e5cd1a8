"""Archived tasks move back as they were; tasks that are locked, or whose id is taken, stay in the archive."""

from __future__ import annotations

from datetime import datetime, time, timedelta, timezone

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.errors import ConfigurationError
from django_pglock.models import ArchivedTask, Attempt, Task
from django_pglock.store import archived as lookup
from django_pglock.store.archive_state import archive_state, turn_off, turn_on
from django_pglock.store.archived import find_archived, succeeded_among
from django_pglock.store.restore import Restored
from django_pglock.store.restore import restore as restore_all
from tests.db.store.archiving import TWO_HOURS, fail, moved, walk
from tests.db.store.test_prune import ago, make
from tests.sample import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


def restore(batch=1000):
    """Move back all tasks of all days; return their number."""
    turn_off("default")
    return restore_all("default", batch=batch).moved


def values_of(rows):
    return list(rows.order_by("pk").values())


def test_tasks_and_their_attempts_move_back_as_they_were():
    turn_on("default")
    midnight = datetime.combine(datetime.now(timezone.utc) - timedelta(days=3), time(), timezone.utc)
    make(days=4)
    plain, keyed = (
        make(days=4, finished_at=midnight),
        make(days=TWO_HOURS, attempts=3, retries=2, unique_key="u", unique_scope="UNFINISHED"),
    )
    Task.objects.filter(pk=plain.pk).update(
        args=[1], kwargs={"a": None}, result={"r": [1]}, meta={"m": 1}, progress=[1, 2], log="x", lock_key="l",
        group_key="g", fair_key="f", concurrency=3, cancel_requested_at=ago(1), priority=7,
    )  # fmt: skip
    fail(keyed, 1), fail(keyed, 2, outcome="LOST", worker=None, log=None)
    before, attempts = values_of(Task.objects.all()), values_of(Attempt.objects.all())
    assert walk() == 3
    assert not Attempt.objects.exists()
    assert restore(batch=1) == 3
    with connection.cursor() as cursor:
        cursor.execute("SHOW enable_seqscan")
        assert cursor.fetchone() == ("on",), "a setting outlasts its batch"
    assert values_of(Task.objects.all()) == before
    back = values_of(Attempt.objects.all())
    assert [{**each, "id": 0} for each in back] == [{**each, "id": 0} for each in attempts]
    assert moved(plain, keyed) == [False, False]


@pytest.mark.parametrize("scope", ["WAITING", "UNFINISHED", "PERIOD"])
def test_a_task_that_moves_back_does_not_take_its_unique_key(scope):
    turn_on("default")
    period = {"unique_until": Now() - timedelta(hours=1)} if scope == "PERIOD" else {}
    old = make(days=TWO_HOURS, unique_key="u", unique_scope=scope, **period)
    assert walk() == 1
    make("READY", days=0, unique_key="u", unique_scope="UNFINISHED")
    assert restore() == 1
    assert Task.objects.get(pk=old.pk).unique_key == "u"


def test_tasks_that_are_locked_or_whose_id_is_taken_stay(somebody):
    turn_on("default")
    locked, taken, free = (make(days=TWO_HOURS) for _ in range(3))
    assert walk() == 3
    other = make("READY", days=0, id=taken.pk)
    somebody.connection.set_autocommit(False)
    somebody.ask("SELECT id FROM django_pglock_archivedtask WHERE id = %s FOR UPDATE", locked.pk)
    assert restore() == 1
    somebody.connection.rollback()
    assert Task.objects.get(pk=taken.pk).status == other.status == "READY"
    assert set(ArchivedTask.objects.values_list("pk", flat=True)) == {locked.pk, taken.pk}
    assert Task.objects.filter(pk=free.pk).exists()


def test_each_day_is_reported_and_the_tasks_that_stay_are_counted():
    turn_on("default")
    rows = [make(days=days) for days in (4, 4, 3, TWO_HOURS)]
    assert walk() == 4
    make("READY", days=0, id=rows[2].pk)
    [first, _, last] = archive_state("default").days
    turn_off("default")
    told = []
    assert restore_all("default", batch=1, progress=lambda *values: told.append(values)) == Restored(3, 1)
    assert told == [(first, 2), (last, 1)]


def test_tasks_do_not_move_back_while_the_archive_is_on():
    turn_on("default")
    row = make(days=TWO_HOURS)
    assert walk() == 1
    with pytest.raises(ConfigurationError, match="The archive is on: workers would move the tasks to it again"):
        restore_all("default")
    assert moved(row) == [True]


def test_an_id_that_is_twice_in_the_archive_moves_back_once():
    turn_on("default")
    row = make(days=TWO_HOURS)
    assert walk() == 1
    with connection.cursor() as cursor:
        cursor.execute("CREATE TEMP TABLE twice AS SELECT * FROM django_pglock_archivedtask")
        cursor.execute("UPDATE twice SET finished_at = finished_at - interval '1 ms'")
        cursor.execute("INSERT INTO django_pglock_archivedtask SELECT * FROM twice")
        cursor.execute("DROP TABLE twice")
    assert restore() == 1
    assert Task.objects.get().pk == ArchivedTask.objects.get().pk == row.pk


def test_a_task_that_moves_back_during_a_search_is_found(monkeypatch):
    """The search has not found it in the table, and no longer finds it in the archive."""
    turn_on("default")
    row = make(days=TWO_HOURS, task_path=tasks.nothing.module_path)
    assert walk() == 1
    original = lookup.may_be_archived

    def restore_first(using):
        monkeypatch.setattr(lookup, "may_be_archived", original)
        assert original(using)
        assert restore() == 1
        return True

    monkeypatch.setattr(lookup, "may_be_archived", restore_first)
    assert find_archived("default", row.pk).pk == row.pk
    assert succeeded_among("default", [row.pk, make("FAILED", days=0).pk]) == {row.pk}
