"""Days of the archive: created as they are needed, dropped when they are old enough."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import DatabaseError, OperationalError, connection
from django.utils import timezone as django_timezone

from django_pglock.models import ArchivedTask, Task
from django_pglock.store import archive_days
from django_pglock.store.archive_days import EXPIRED, create_days, drop_days, expired_days, prune_archive, sizes_of_days
from django_pglock.store.archive_state import archive_state, table_of
from tests.db.store.archiving import TWO_HOURS, moved, walk
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


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
    assert expired_days("default", 7) == [before[0]]
    assert drop_days("default", 7) == [before[0]]
    assert archive_state("default").days == before[1:]
    assert ArchivedTask.objects.count() == 2
    assert drop_days("default", 7) == []


def test_days_are_pruned_by_the_age_of_successful_tasks(settings):
    for days in (9, 3):
        make(days=days)
    walk(days=30)
    assert prune_archive("default", dry_run=True) == 1
    assert ArchivedTask.objects.count() == 2
    assert prune_archive("default", statuses=["CANCELLED"], older_than=1) == 0
    assert prune_archive("default", statuses=["SUCCESSFUL"], older_than=20) == 0
    assert prune_archive("default") == 1
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "PRUNE_AFTER": {"SUCCESSFUL": None, "CANCELLED": 1}}
    assert prune_archive("default") == 0
    assert ArchivedTask.objects.count() == 1
    assert prune_archive("default", statuses=["SUCCESSFUL"], older_than=1) == 1


def test_wrong_arguments_drop_no_day():
    make(days=9)
    walk(days=30)
    with pytest.raises(ValueError, match="RUNNING tasks cannot be pruned"):
        prune_archive("default", statuses=["RUNNING"])
    with pytest.raises(ValueError, match="older_than is -1"):
        prune_archive("default", older_than=-1)
    assert ArchivedTask.objects.count() == 1


def test_task_objects_prune_leaves_the_archive():
    """Its tasks may be selected by filters, and a day is dropped as a whole."""
    make(days=9)
    walk(days=30)
    assert Task.objects.prune() == 0
    assert ArchivedTask.objects.count() == 1


def test_without_an_archive_pruning_it_takes_one_statement(django_assert_num_queries):
    with django_assert_num_queries(1):
        assert prune_archive("default") == 0


def test_a_day_is_dropped_only_when_all_its_tasks_are_old_enough():
    """The first task of the day may be a day older than the last one."""
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
    limits = " || ' ' || ".join(f"current_setting('{name}')" for name in ("application_name", *archive_days.LIMITS))
    monkeypatch.setattr(archive_days, "DROP", archive_days.sql.SQL(f"SELECT ({limits})::int -- {{part}}"))
    with pytest.raises(DatabaseError, match='"django_pglock archive 1s 20s 20s"'):
        drop_days("default", 7)
    monkeypatch.undo()
    assert len(archive_state("default").days) == 1
    assert len(drop_days("default", 7)) == 2
    assert drop_days("default", 7) == []
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_class WHERE relname ~ '^django_pglock_archivedtask_2'")
        assert cursor.fetchone() == (0,)


def test_an_interrupted_detach_is_finished(monkeypatch, eventually):
    """As after a crash of the server in the middle of DETACH PARTITION CONCURRENTLY."""
    make(days=9)
    walk(days=30)
    [day] = archive_state("default").days
    part = table_of(day)
    with connection.cursor() as cursor:
        cursor.execute(f"COMMENT ON TABLE {part} IS '{EXPIRED}'")
        cursor.execute(f"UPDATE pg_inherits SET inhdetachpending = true WHERE inhrelid = '{part}'::regclass")
        assert sizes_of_days("default") == []
        with monkeypatch.context() as failing, pytest.raises(DatabaseError, match="division by zero"):
            # Without it, DROP TABLE would lock the whole archive.
            failing.setattr(archive_days, "FINISH_DETACH", archive_days.sql.SQL("SELECT 1/0 -- {archive} {part}"))
            drop_days("default", 7)
        # The server may not have ended the session of the first call, which has a lock on the archive.
        assert eventually(lambda: drop_days("default", 7)) == [day]
        cursor.execute("SELECT to_regclass(%s)", [part])
        assert cursor.fetchone() == (None,)


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


def analyze():
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE django_pglock_archivedtask")


def test_the_rows_of_a_day_are_those_of_the_statistics():
    for _ in range(3):
        make(days=TWO_HOURS)
    walk()
    analyze()
    ArchivedTask.objects.earliest("pk").delete()
    [day] = sizes_of_days("default")
    assert day.rows == 3
    assert day.size > 8192


@pytest.mark.parametrize("is_analyzed", [False, True])
def test_the_rows_of_a_day_without_statistics_are_counted(is_analyzed):
    """Autovacuum may have analyzed the partition when it was empty."""
    for days in (3, TWO_HOURS, 3):
        row = make(days=days)
    if is_analyzed:
        create_days("default", [(django_timezone.now() - timedelta(days=days)).astimezone(timezone.utc).date()])
        analyze()
    walk()
    assert [each.rows for each in sizes_of_days("default")] == [2, 1]
    ArchivedTask.objects.filter(pk=row.pk).delete()
    assert [each.rows for each in sizes_of_days("default")] == [1, 1]


def test_the_rows_of_a_long_day_without_statistics_are_estimated_by_its_first_pages(monkeypatch):
    """So the count reads no day of millions of rows."""
    for _ in range(100):
        make(days=TWO_HOURS)
    walk()
    monkeypatch.setattr(archive_days, "PAGES_COUNTED", 1)
    [day] = sizes_of_days("default")
    assert 50 < day.rows < 150
    ArchivedTask.objects.all().delete()
    assert sizes_of_days("default")[0].rows == 0


def test_concurrent_creations_of_a_partition_make_one_partition(in_threads):
    day = django_timezone.now().date()
    states = in_threads(lambda _: create_days("default", [day]), 4)
    assert {state.days for state in states} == {(day,)}


def test_a_new_day_does_not_wait_for_a_locked_archive(session, monkeypatch):
    monkeypatch.setitem(archive_days.LIMITS, "lock_timeout", "10ms")
    session.set_autocommit(False)
    with session.cursor() as cursor:
        cursor.execute("LOCK TABLE django_pglock_archivedtask IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(OperationalError, match="lock timeout"):
            create_days("default", [django_timezone.now().date()])
        cursor.execute("ROLLBACK")


def test_a_new_day_leaves_no_limit_in_the_session():
    create_days("default", [django_timezone.now().date()])
    with connection.cursor() as cursor:
        cursor.execute("SHOW lock_timeout")
        assert cursor.fetchone() == ("0",)
