"""A user runs a schedule now."""

from __future__ import annotations

import pytest
from django.db.models.functions import Now

from django_pglock.models import Schedule, Task
from django_pglock.tasks.options import Unique
from tests.db.store.schedules import NIGHTLY, schedule
from tests.sample import scheduled

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_registry")]


def test_run_now_leaves_the_schedule_as_it_is():
    row = schedule(unique=Unique(on_conflict="raise"))
    schedule(scheduled.hourly)
    Schedule.objects.create(task_path="nobody.knows", expression="every 5 s", timezone="", next_at=Now())
    assert len(Schedule.objects.all().run_now()) == 2
    assert len(Schedule.objects.all().run_now()) == 1, "one is unique"
    assert Schedule.objects.filter(pk="nobody.knows").run_now() == []
    assert set(Task.objects.values_list("meta__schedule", flat=True)) == {None}
    assert Schedule.objects.get(pk=NIGHTLY).next_at == row.next_at
