"""Dates that Python does not have, in rows written by hand: no page and no command may fail because of one."""

from __future__ import annotations

import io
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection, models
from django.db.models.functions import Now
from django.test import override_settings
from django.urls import reverse

from django_pglock.models import Attempt, FailureGroup, Lease, Queue, Task, Worker
from django_pglock.models.dates import ReadableDateTimeField
from django_pglock.store.statements import READABLE
from django_pglock.tasks.compat import task_backends
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db

ODD = {"infinity": READABLE[1], "-infinity": READABLE[0], "20000-01-01": READABLE[1], "4713-01-01 BC": READABLE[0]}
PAGES = ("overview", "task", "failuregroup", "queue", "worker", "lease")
COMMANDS = (["status"], ["list"], ["list", "--json"], ["failures"], ["schedules"], ["keda"], ["stats"])


def columns():
    """Yield the tables and the columns that are read as the nearest date."""
    for model in apps.get_app_config("django_pglock").get_models():
        for field in model._meta.concrete_fields:
            if isinstance(field, ReadableDateTimeField):
                yield model._meta.db_table, field.column


def write_everywhere(date):
    """Write the date into each of these columns in all rows that take it."""
    with connection.cursor() as cursor:
        for table, column in columns():
            if table != "django_pglock_archivedtask":
                cursor.execute(f"UPDATE {table} SET {column} = %s WHERE {column} IS NOT NULL", [date])


@pytest.fixture
def rows():
    """A row with all dates in each table."""
    failed = make(
        "FAILED", attempts=1, fingerprint=7, started_at=Now(), cancel_requested_at=Now(), expires_at=Now(),
        unique_key="k", unique_scope="PERIOD", unique_until=Now(),
    )  # fmt: skip
    for status in ("READY", "BLOCKED", "RUNNING", "FAILED"):
        make(status, started_at=Now())
    Attempt.objects.create(
        task=failed, number=1, started_at=Now(), finished_at=Now(), outcome="FAILED", exception_path="a.B"
    )
    Worker.objects.create(id=uuid4(), queues=[], threads=1, pid=7)
    Queue.objects.pause("mail")
    Queue.objects.pause("default")
    FailureGroup.objects.create(fingerprint=7, muted_at=Now())
    Lease.objects.create(
        key=1, name="x", owner="me", holder=uuid4(), token=1, acquired_at=Now(), renewed_at=Now(), expires_at=Now(),
        released_at=Now(),
    )  # fmt: skip
    return failed


@pytest.mark.parametrize(("written", "date"), ODD.items())
def test_a_date_that_python_does_not_have_is_read_as_the_nearest(rows, written, date):
    write_everywhere(written)
    for found in (Task.objects.get(pk=rows.pk), Task.objects.only("finished_at").get(pk=rows.pk)):
        assert (found.finished_at, found.expires_at, found.run_after.year > 2000) == (date, date, True)
    assert Task.objects.exclude(unique_until=None).get().unique_until == date
    assert Attempt.objects.select_related("task").get().task.enqueued_at == date
    assert (Lease.objects.get().released_at, Worker.objects.get().heartbeat_at) == (date, date)
    assert Task.objects.filter(status="READY").get().finished_at is None


@pytest.mark.parametrize(("written", "zone"), [("infinity", "Pacific/Kiritimati"), ("-infinity", "Etc/GMT+12")])
def test_no_page_and_no_command_fails_because_of_one(client, rows, written, zone):
    client.force_login(User.objects.create_superuser("root"))
    write_everywhere(written)
    with override_settings(TIME_ZONE=zone):
        urls = [reverse(f"admin:django_pglock_{page}_changelist") for page in PAGES]
        urls += [f"{urls[1]}?status__exact=FAILED", f"{urls[1]}?since=2026-01-01"]
        urls += [
            reverse("admin:django_pglock_task_change", args=[pk]) for pk in Task.objects.values_list("pk", flat=True)
        ]
        urls += [reverse("admin:django_pglock_task_attempt", args=[rows.pk, 1])]
        for url in urls:
            assert client.get(url).status_code == 200, url
        answer = client.post(reverse("admin:django_pglock_task_export", args=["csv"]))
        assert str(rows.pk) in b"".join(answer.streaming_content).decode()
        for command in (*COMMANDS, ["show", str(rows.pk)], ["show", str(rows.pk), "--json"]):
            call_command("locktasks", *command, stdout=io.StringIO())
        call_command("dumpdata", "django_pglock", stdout=io.StringIO())
        assert task_backends["default"].get_result(str(rows.pk)).status == "FAILED"


def test_rows_are_ordered_by_the_column_which_has_an_index():
    values, rows = Task.objects.order_by("expires_at").values_list("expires_at"), Task.objects.order_by("expires_at")
    assert "CASE" not in str(values.query)
    assert str(rows.query).endswith('ORDER BY "django_pglock_task"."expires_at" ASC')


def test_migrations_see_djangos_own_field():
    assert {path for _, column in columns() for path in [column]} >= {"finished_at", "muted_at", "paused_at"}
    field = Task._meta.get_field("finished_at")
    assert isinstance(field, models.DateTimeField)
    assert field.deconstruct()[1] == "django.db.models.DateTimeField"
    call_command("makemigrations", "django_pglock", check=True, dry_run=True, verbosity=0)
