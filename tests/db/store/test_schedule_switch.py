"""A disabled schedule enqueues nothing, and does not enqueue missed ticks later."""

from __future__ import annotations

import pytest
from django.db.models import F

from django_pglock.models import Schedule
from django_pglock.store import schedule_switch
from django_pglock.store.schedule_tick import enqueue_due
from tests.db.store.schedules import HOUR, schedule
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_a_disabled_schedule_is_skipped_and_continues_with_the_next_tick():
    row = schedule(due=5.5 * HOUR)
    assert Schedule.objects.disable() == 1
    assert Schedule.objects.disable() == 0
    assert enqueue_due("default") == ([], None)
    assert Schedule.objects.all().enable() == 1
    assert Schedule.objects.all().enable() == 0
    assert Schedule.objects.get().next_at == row.next_at + 6 * HOUR
    assert enqueue_due("default").tasks == []


def test_each_schedule_gets_its_own_date():
    one, other = schedule(due=5.5 * HOUR), schedule(scheduled.hourly, every=4 * HOUR)
    Schedule.objects.update(next_at=one.next_at)
    assert Schedule.objects.disable() == 2
    assert Schedule.objects.all().enable() == 2
    dates = dict(Schedule.objects.values_list("pk", "next_at"))
    assert dates == {one.pk: one.next_at + 6 * HOUR, other.pk: one.next_at + 8 * HOUR}


@pytest.mark.parametrize("change", [{"next_at": F("next_at") + 9 * HOUR}, {"is_enabled": True}], ids=str)
def test_a_schedule_that_has_changed_since_it_was_read_does_not_get_an_old_date(monkeypatch, change):
    """As when a process with new code registers a new expression at this moment, or another person enables it."""
    schedule(due=5.5 * HOUR)
    Schedule.objects.disable()
    read, changed = schedule_switch.read_rows, []

    def read_and_change(*values):
        found = read(*values)
        Schedule.objects.update(**change)
        changed.append(Schedule.objects.get().next_at)
        return found

    monkeypatch.setattr(schedule_switch, "read_rows", read_and_change)
    assert Schedule.objects.all().enable() == 0
    assert [Schedule.objects.get().next_at] == changed
