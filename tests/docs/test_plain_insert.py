"""A program without Django enqueues as the documentation says: its SQL runs as it stands there."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.db.models import DateTimeField
from psycopg import errors

from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from example_project.shop.models import Effect
from tests.conftest import ROOT
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

SECTION = (ROOT / "docs" / "tasks.md").read_text().partition("## From another language")[2].partition("\n## ")[0]
[AT_ONCE, OTHERS, RIGHTS, UNREADABLE] = re.findall(r"^```sql\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)
TABLE = re.findall(r"^\| (`.*?) \|.*\| (.*?) \|$", SECTION, re.MULTILINE)


@pytest.fixture
def other_program():
    """Run SQL in a session of its own, by a role that has the rights of the documentation and no others."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE other_program")
        cursor.execute(RIGHTS)
    session = dedicated_connection("default")
    try:
        with session.cursor() as cursor:
            cursor.execute("SET ROLE other_program")
            yield cursor.execute
    finally:
        session.close()
        execute_sql("DROP OWNED BY other_program; DROP ROLE other_program")


def numbers():
    return sorted(Effect.objects.values_list("number", flat=True))


def test_a_plainly_inserted_task_runs(other_program, worker, eventually):
    running = worker()
    eventually(lambda: running.feeder.asks)
    other_program(AT_ONCE)
    eventually(lambda: numbers() == [1])
    other_program(OTHERS)
    other_program(OTHERS.rpartition("-- Unless")[2].partition("\n")[2])
    eventually(lambda: numbers() in ([1, 3, 4], [1, 3, 4, 4]))
    [later] = Task.objects.filter(status="SCHEDULED")
    assert later.kwargs == {"number": 2}
    assert Task.objects.filter(pk=later.pk).run_now() == 1
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == Task.objects.count())
    assert set(numbers()) == {1, 2, 3, 4}


def test_the_second_of_a_unique_key_is_refused_while_the_first_waits(other_program):
    unique = OTHERS.rpartition("-- Unless")[2].partition("\n")[2]
    for _ in range(2):
        other_program(unique)
    assert Task.objects.count() == 1
    with pytest.raises(Exception, match="pglock_task_unique") as refused:
        other_program(unique.replace("ON CONFLICT DO NOTHING", ""))
    assert isinstance(refused.value.__cause__, errors.UniqueViolation)


@pytest.mark.parametrize("date", ["infinity", "-infinity", "10000-01-01"])
def test_a_date_that_python_does_not_have_is_refused(other_program, date):
    later = OTHERS.partition("\n\n")[0]
    with pytest.raises(Exception, match="pglock_task_run_after") as refused:
        other_program(later.replace("now() + interval '1 hour'", f"'{date}'"))
    assert isinstance(refused.value.__cause__, errors.CheckViolation)


def test_the_rights_are_those_for_the_columns_of_the_table(other_program):
    named = {name for cell, _ in TABLE for name in re.findall(r"`(\w+)`", cell)}
    assert set(re.findall(r"\w+", RIGHTS.partition("INSERT (")[2].partition(")")[0])) == named
    for field in Task._meta.fields:
        if field.name not in named:
            with pytest.raises(Exception, match="permission denied") as refused:
                other_program(f"INSERT INTO django_pglock_task ({field.column}) VALUES (NULL)")
            assert isinstance(refused.value.__cause__, errors.InsufficientPrivilege)


def test_tasks_with_a_date_that_python_does_not_have_are_found():
    dates = [each.name for each in Task._meta.fields if isinstance(each, DateTimeField) and each.name != "run_after"]
    wrong = set()
    with connection.cursor() as cursor:
        for name in dates:
            for date in ("infinity", "-infinity", "2026-01-01"):
                cursor.execute(
                    f"INSERT INTO django_pglock_task (queue, backend, task_path, {name}, status) "
                    "VALUES ('default', 'default', 'x', %s, %s) RETURNING id",
                    [date, "CANCELLED" if name == "finished_at" else "READY"],
                )
                wrong |= set(cursor.fetchone()) if "infinity" in date else set()
        cursor.execute(UNREADABLE)
        found = {id_ for (id_,) in cursor.fetchall()}
    assert found == wrong
    assert len(wrong) == 2 * len(dates)


def test_the_table_has_all_columns_that_are_needed_and_none_that_is_not_there():
    named = {name: default for cell, default in TABLE for name in re.findall(r"`(\w+)`", cell)}
    fields = {field.name: field for field in Task._meta.fields}
    assert set(named) <= set(fields)
    needed = {name for name, field in fields.items() if not (field.null or field.has_db_default() or field.primary_key)}
    assert needed == {"queue", "backend", "task_path"}
    assert needed == {name for name, default in named.items() if default == "needed"}
