"""Schedules are registered once, and their first tick is after the registration."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.utils import timezone

from django_pglock.models import Schedule
from django_pglock.store.schedule_register import register
from tests.db.store.schedules import HOUR, NIGHTLY, schedule
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_new_schedule_counts_from_its_registration():
    row = schedule()
    assert (row.pk, row.expression, row.timezone, row.is_enabled) == (NIGHTLY, "every 3600 s", "", True)
    assert timedelta(0) <= timezone.now() + HOUR - row.next_at < HOUR / 2
    daily = schedule(scheduled.hourly, every=None, cron="0 3 * * *", timezone="Europe/Berlin")
    assert (daily.expression, daily.timezone) == ("0 3 * * *", "Europe/Berlin")
    assert daily.next_at > timezone.now()


def test_a_schedule_that_has_not_changed_is_not_locked(session):
    """A worker starts also while a tick, or a person, holds the row."""
    schedule(), schedule(scheduled.hourly)
    session.set_autocommit(False)
    with session.cursor() as other, connection.cursor() as cursor:
        other.execute("SELECT FROM django_pglock_schedule FOR UPDATE")
        cursor.execute("SET lock_timeout = '1s'")
        assert register("default") == []
        other.execute("ROLLBACK")


def test_registering_a_schedule_again_changes_it_only_with_code_or_settings(settings):
    before = schedule(due=HOUR, every=None, cron="*/7 * * * *")
    Schedule.objects.update(is_enabled=False)
    assert register("default") == []
    assert Schedule.objects.get().next_at == before.next_at
    settings.TIME_ZONE = "Asia/Kolkata"
    assert register("default") == [NIGHTLY]
    row = Schedule.objects.get()
    assert (row.timezone, row.is_enabled) == ("Asia/Kolkata", False)
    assert row.next_at > timezone.now()
    assert schedule(every=60).expression == "every 60 s"
