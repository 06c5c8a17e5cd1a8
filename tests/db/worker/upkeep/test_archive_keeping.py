"""Upkeep of the archive: when tasks move and days are dropped, and the messages if this is impossible."""

from __future__ import annotations

import logging
import time

import pytest
from django.db import connection

from django_pglock.models import ArchivedTask, Task
from django_pglock.store.archive_state import archive_state, turn_off, turn_on
from django_pglock.worker.upkeep import archive_keeping
from django_pglock.worker.upkeep.archive_keeping import ArchiveKeeping
from tests.db.store.archiving import TWO_HOURS, walk
from tests.db.store.test_prune import make

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


@pytest.fixture
def at_once(monkeypatch):
    """Let tasks move as soon as the archive is on."""
    monkeypatch.setattr(archive_keeping, "UNTIL_FIRST_MOVE", 0.0)
    monkeypatch.setattr(archive_keeping, "CHECK_INTERVAL", 0.0)


def test_a_worker_moves_tasks_once_the_archive_is_on(worker, eventually, at_once):
    rows = [make(days=TWO_HOURS) for _ in range(5)]
    failed = make("FAILED", days=TWO_HOURS)
    running = worker()
    turn_on("default")
    eventually(lambda: ArchivedTask.objects.count() == len(rows))
    assert list(Task.objects.all()) == [failed]
    turn_off("default")
    # A round that began before may still move tasks.
    off_at = time.monotonic()
    eventually(lambda: running.upkeep.archive._check_at > off_at)
    late = make(days=TWO_HOURS)
    keeping = ArchiveKeeping("default")
    keeping.run_if_due()
    assert Task.objects.filter(pk=late.pk).exists()


def test_no_task_moves_before_each_process_has_read_that_the_archive_is_on():
    """A process that has cached that the archive is empty does not search a result there."""
    make(days=TWO_HOURS)
    turn_on("default")
    ArchiveKeeping("default").run_if_due()
    assert Task.objects.count() == 1


def test_the_check_of_an_archive_that_is_off_is_one_statement(django_assert_num_queries):
    keeping = ArchiveKeeping("default")
    with django_assert_num_queries(1):
        assert keeping.run_if_due() is None
    with django_assert_num_queries(0):
        assert keeping.run_if_due() is None


def test_a_move_ends_in_time_and_continues_in_the_next_round(at_once, monkeypatch):
    monkeypatch.setattr(archive_keeping, "TIME_TO_MOVE", 1e-9)
    monkeypatch.setattr(archive_keeping, "MOVED_AT_ONCE", 2)
    rows = [make(days=TWO_HOURS) for _ in range(5)]
    turn_on("default")
    keeping = ArchiveKeeping("default")
    for left in (3, 1, 0):
        keeping._check_at = 0.0
        assert 0 < keeping.run_if_due() <= archive_keeping.BETWEEN_BATCHES
        assert Task.objects.count() == left
    keeping._check_at = 0.0
    assert keeping.run_if_due() is None, "the walk has ended"
    assert ArchivedTask.objects.count() == len(rows)


def test_old_days_are_dropped_also_when_the_archive_is_off(at_once, settings, caplog):
    caplog.set_level(logging.INFO, "django_pglock.worker")
    for days in (9, TWO_HOURS):
        make(days=days)
    walk(days=30)
    kept = archive_state("default").days[1:]
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "PRUNE_AFTER": {}}
    ArchiveKeeping("default").run_if_due()
    assert len(archive_state("default").days) == 2, "tasks are kept forever"
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "PRUNE_AFTER": {"SUCCESSFUL": 7}}
    ArchiveKeeping("default").run_if_due()
    assert archive_state("default").days == kept
    assert "was dropped" in caplog.text


def test_tasks_that_are_pruned_within_an_hour_do_not_move(at_once, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "PRUNE_AFTER": {"SUCCESSFUL": 0.01}}
    make(days=TWO_HOURS)
    turn_on("default")
    ArchiveKeeping("default").run_if_due()
    assert Task.objects.count() == 1


def test_a_table_that_refers_to_tasks_stops_the_move_and_is_named_once(at_once, caplog):
    """With ON DELETE CASCADE its rows would go as well."""
    row = make(days=TWO_HOURS)
    turn_on("default")
    keeping = ArchiveKeeping("default")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE keeps_task (task bigint REFERENCES django_pglock_task (id) ON DELETE CASCADE)")
        try:
            for _ in range(2):
                keeping.run_if_due()
            assert Task.objects.filter(pk=row.pk).exists()
            assert caplog.text.count("keeps_task has a foreign key to tasks") == 1
        finally:
            cursor.execute("DROP TABLE keeps_task")
    keeping.run_if_due()
    assert ArchivedTask.objects.filter(pk=row.pk).exists()


def test_a_role_without_the_right_to_create_tables_is_reported_once(at_once, caplog):
    row = make(days=TWO_HOURS)
    turn_on("default")
    keeping = ArchiveKeeping("default")
    with connection.cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS no_archivist")
        cursor.execute("CREATE ROLE no_archivist")
        cursor.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO no_archivist")
        cursor.execute("SET ROLE no_archivist")
        try:
            for _ in range(2):
                assert keeping.run_if_due() is None
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY no_archivist")
            cursor.execute("DROP ROLE no_archivist")
    assert caplog.text.count("Finished tasks are not moved to the archive: permission denied") == 1
    assert Task.objects.filter(pk=row.pk).exists()


def test_a_batch_that_fails_is_tried_again_with_fewer_rows(at_once, monkeypatch):
    sizes = []

    def fail_when_large(using, after, days, *, batch):
        sizes.append(batch)
        if batch > 50:
            raise archive_keeping.DatabaseError("canceling statement due to statement timeout")
        return 0, 0

    monkeypatch.setattr(archive_keeping, "archive_window", fail_when_large)
    turn_on("default")
    keeping = ArchiveKeeping("default")
    for _ in range(2):
        with pytest.raises(archive_keeping.DatabaseError):
            keeping.run_if_due()
    keeping.run_if_due()
    assert sizes == [1000, 100, 10]
