"""Which schedules belong to a database."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, connection

from django_pglock.store.schedule_register import register
from django_pglock.store.schedule_rows import known
from django_pglock.tasks.compat import BaseTaskBackend
from tests.db.store.schedules import HOUR, NIGHTLY, decorate, schedule
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_schedules_of_other_backends_and_databases_are_not_changed(settings):
    ours = {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}
    dummy = {"BACKEND": f"{BaseTaskBackend.__module__.removesuffix('base')}dummy.DummyBackend"}
    settings.TASKS = {"default": dummy, "ours": ours, "far": {**ours, "OPTIONS": {"database": "elsewhere"}}}
    decorate(scheduled.nightly, every=HOUR)
    decorate(scheduled.hourly, every=HOUR, backend="far")
    assert known("default") == {}
    assert register("default") == []
    assert schedule(backend="ours").pk == NIGHTLY


@pytest.mark.parametrize("column", ["next_at", "last_at"])
@pytest.mark.parametrize("date", ["infinity", "-infinity", "10000-01-01"])
def test_a_date_that_python_does_not_have_is_refused(column, date):
    """It would stop all schedules: the statement that reads the dates that are due would fail."""
    decorate(scheduled.nightly, every=HOUR)
    register("default")
    with pytest.raises(IntegrityError, match="pglock_schedule_dates"), connection.cursor() as cursor:
        cursor.execute(f"UPDATE django_pglock_schedule SET {column} = '{date}'")
