"""The switch of the archive in the database, and the rights of a role."""

from __future__ import annotations

from datetime import date
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_pglock.errors import ConfigurationError
from django_pglock.models import Worker
from django_pglock.store import archive_state as module
from django_pglock.store.archive_days import create_days, sizes_of_days
from django_pglock.store.archive_state import (
    ArchiveState,
    Rights,
    archive_state,
    day_of,
    existing_archive,
    has_days,
    may_be_archived,
    references_to_tasks,
    rights_in_archive,
    table_of,
    turn_off,
    turn_on,
)
from django_pglock.store.liveness import beat

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


def test_turning_the_archive_on_or_off_changes_its_state_in_the_database():
    assert not archive_state("default").is_on
    assert not may_be_archived("default")
    assert turn_on("default")
    assert may_be_archived("default"), "this process knows it at once"
    state = archive_state("default")
    assert state.exists
    assert 0 <= state.on_for < 600
    assert state.may_have_rows
    assert turn_off("default")
    assert not archive_state("default").is_on
    assert not archive_state("default").may_have_rows
    create_days("default", [timezone.now().date()])
    assert archive_state("default").may_have_rows


def test_the_archive_is_turned_on_once_and_keeps_its_date():
    """A later date would make workers wait again, until all processes have read the state."""
    assert not turn_off("default")
    assert turn_on("default")
    with connection.cursor() as cursor:
        cursor.execute("COMMENT ON TABLE django_pglock_archivedtask IS 'archive on since 1'")
    assert not turn_on("default")
    assert archive_state("default").on_for > 1_000_000


def test_the_archive_is_not_turned_on_if_a_table_refers_to_tasks():
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE keeps_task (task bigint REFERENCES django_pglock_task (id))")
        try:
            with pytest.raises(ConfigurationError, match="keeps_task has a foreign key to them"):
                turn_on("default")
        finally:
            cursor.execute("DROP TABLE keeps_task")
    assert not archive_state("default").is_on


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        ({"is_owner": False}, "The role a does not own the archive; b does"),
        ({"may_create": False}, "The role a may not create tables in the schema public"),
    ],
)
def test_the_archive_is_not_turned_on_without_the_rights_to_move_tasks(monkeypatch, rights, said):
    """``tests/db/management/test_archiving.py`` has real roles."""
    found = Rights(**{"role": "a", "owner": "b", "is_owner": True, "may_create": True, **rights})
    monkeypatch.setattr(module, "rights_in_archive", lambda using: found)
    with pytest.raises(ConfigurationError, match=said):
        turn_on("default")
    assert not archive_state("default").is_on


def test_a_query_asks_whether_the_archive_has_a_day():
    asked = Worker.objects.order_by().values_list(has_days(), flat=True)
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    assert asked.get() is False
    create_days("default", [timezone.now().date()])
    assert asked.get() is True


def test_a_process_reads_the_state_of_the_archive_only_every_few_seconds(monkeypatch, django_assert_num_queries):
    """Otherwise each search for a missing task would send one more query, also without an archive."""
    assert module.UNTIL_FIRST_MOVE > module.CACHED_FOR, "then all processes know that the archive is on"
    module._known.clear()
    with django_assert_num_queries(1):
        assert not may_be_archived("default")
        assert not may_be_archived("default")
    monkeypatch.setattr(module, "CACHED_FOR", 0.0)
    with django_assert_num_queries(1):
        assert not may_be_archived("default")


def test_before_the_migration_that_makes_its_table_there_is_no_archive():
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE django_pglock_archivedtask RENAME TO of_a_later_version")
        none = ArchiveState(exists=False, on_for=None, schema="", is_readable=False, days=())
        assert archive_state("default") == none
        for verb in (existing_archive, turn_on, turn_off):
            with pytest.raises(ConfigurationError, match=r"no table for the archive\. Run: manage.py migrate"):
                verb("default")
        assert not may_be_archived("default")
        transaction.set_rollback(True)


def test_only_tables_that_the_package_has_named_are_days():
    assert day_of(table_of(date(2026, 11, 5))) == date(2026, 11, 5)
    for name in ("_default", "_20261332", "_2026115", "_20261105_old"):
        assert day_of("django_pglock_archivedtask" + name) is None


def test_tables_that_refer_to_tasks_are_named():
    assert references_to_tasks("default") == []
    names = [f"keeps_task_{number}" for number in range(5)]
    with connection.cursor() as cursor:
        # The order must not be that of a plan that sorts anyway.
        cursor.execute("SET enable_sort = off")
        for name in reversed(names):
            reference = "bigint REFERENCES django_pglock_task (id)"
            cursor.execute(f"CREATE TABLE {name} (task {reference}, other_task {reference})")
        try:
            assert references_to_tasks("default") == names
        finally:
            cursor.execute(f"DROP TABLE {', '.join(names)}")


def test_a_partition_of_another_name_is_no_day():
    """A person may have added it."""
    today = timezone.now().date()
    create_days("default", [today])
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE all_others PARTITION OF django_pglock_archivedtask"
            " FOR VALUES FROM ('1970-01-01') TO ('1980-01-01')"
        )
        try:
            assert archive_state("default").days == (today,)
            assert [size.day for size in sizes_of_days("default")] == [today]
        finally:
            cursor.execute("DROP TABLE all_others")


def test_the_owner_of_the_archive_may_move_tasks_there():
    rights = rights_in_archive("default")
    assert rights.role == rights.owner
    assert rights.is_owner
    assert rights.may_create
