"""Dates that Python does not have, in rows that were written by hand."""

from __future__ import annotations

import io
import json
from datetime import datetime, timezone

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models import Min
from django.db.models.functions import Now
from django.test import override_settings
from django.urls import reverse

from django_pglock.models import ArchivedTask, Task
from django_pglock.models.dates import ReadableDateTimeField
from django_pglock.store.promote import next_due_in, promote
from django_pglock.tasks.claim import FIRST_DATE, LAST_DATE
from django_pglock.tasks.compat import task_backends
from django_pglock.worker import Worker
from tests.db.admin.visits import LIST, make
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

ODD = {"infinity": LAST_DATE, "-infinity": FIRST_DATE, "20000-01-01": LAST_DATE, "4713-01-01 BC": FIRST_DATE}


def write(row, **dates):
    """Write dates as a person does who writes SQL."""
    columns = ", ".join(f"{name} = %s" for name in dates)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_pglock_task SET {columns} WHERE id = %s", [*dates.values(), row.pk])


def printed(*arguments):
    out = io.StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


@pytest.mark.parametrize("name", ["run_after", "expires_at", "unique_until"])
@pytest.mark.parametrize(("written", "date"), ODD.items())
def test_a_date_that_python_does_not_have_is_read_as_the_nearest(name, written, date):
    row = make("SCHEDULED")
    write(row, **{name: written})
    assert getattr(Task.objects.get(), name) == date
    assert getattr(Task.objects.only(name).get(), name) == date
    assert Task.objects.aggregate(first=Min(name)) == {"first": date}


def test_other_dates_are_read_as_they_are():
    date = datetime(2026, 2, 28, 23, 59, 59, 999_999, tzinfo=timezone.utc)
    make("SCHEDULED", run_after=date)
    row = Task.objects.get()
    assert (row.run_after, row.expires_at, row.unique_until) == (date, None, None)


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12"])
@pytest.mark.parametrize("written", ODD)
def test_no_page_and_no_command_fails_because_of_one(admin_client, written, zone):
    with override_settings(TIME_ZONE=zone):
        row = make("SCHEDULED")
        write(row, run_after=written, expires_at=written, unique_until=written)
        for url in (LIST, f"{LIST}?status__exact=SCHEDULED", reverse("admin:django_pglock_task_change", args=[row.pk])):
            assert admin_client.get(url).status_code == 200
        for form in ("csv", "jsonl"):
            answer = admin_client.post(reverse("admin:django_pglock_task_export", args=[form]))
            assert str(row.pk) in b"".join(answer.streaming_content).decode()
        for command in (
            ["list"],
            ["list", "--json"],
            ["show", str(row.pk)],
            ["show", str(row.pk), "--json"],
            ["status"],
        ):
            assert printed("locktasks", *command)
        assert json.loads(printed("dumpdata", "django_pglock.task"))[0]["pk"] == row.pk
        assert task_backends["default"].get_result(str(row.pk)).status == "READY"


def test_rows_are_ordered_by_the_column_which_has_an_index():
    values, rows = Task.objects.order_by("run_after").values_list("run_after"), Task.objects.order_by("run_after")
    assert "CASE" not in str(values.query)
    assert str(rows.query).endswith('ORDER BY "django_pglock_task"."run_after" ASC')


def test_a_task_that_waits_until_infinity_waits_and_can_be_run(admin_client):
    row = make("SCHEDULED", run_after=Now(), attempts=0, last_attempted_at=None, worker=None)
    write(row, run_after="infinity")
    assert promote("default") == 0
    assert next_due_in("default") is None
    assert Task.objects.filter(pk=row.pk).run_now() == 1
    Worker(drain=True).run()
    assert Task.objects.get().status == "SUCCESSFUL"


def test_one_that_waits_until_minus_infinity_is_due():
    write(make("SCHEDULED"), run_after="-infinity")
    assert next_due_in("default") < 0
    assert promote("default") == 1


def test_a_ready_task_with_such_a_date_runs_and_is_counted():
    result = tasks.tell_context.enqueue("read")
    write(Task.objects.get(), run_after="infinity")
    assert "1" in printed("locktasks", "status")
    Worker(drain=True).run()
    result.refresh()
    assert result.status == "SUCCESSFUL", result.errors


def test_migrations_see_djangos_own_field():
    assert isinstance(ArchivedTask._meta.get_field("run_after"), ReadableDateTimeField)
    assert Task._meta.get_field("run_after").deconstruct()[1] == "django.db.models.DateTimeField"
    call_command("makemigrations", "django_pglock", check=True, dry_run=True, verbosity=0)
