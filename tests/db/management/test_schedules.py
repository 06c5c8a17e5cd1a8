"""What ``locktasks schedules`` prints."""

from __future__ import annotations

import json

import pytest

from django_pglock.models import Schedule
from tests.db.management.commands.test_locktasks import locktasks
from tests.db.store.test_prune import make

pytestmark = pytest.mark.django_db(transaction=True)


def test_schedules_are_shown_with_the_status_of_their_last_task():
    assert "There is no schedule" in locktasks("schedules")
    row = make("FAILED", days=0)
    dates = {"expression": "every 60 s", "timezone": "", "next_at": "2030-01-01T00:00:00Z"}
    Schedule.objects.create(
        name="a.fetch", task_path="a.fetch", last_task=row.pk, last_at="2029-12-31T00:00:00Z", **dates
    )
    Schedule.objects.create(name="b.gone\x1b", task_path="b.gone\x1b", last_task=row.pk + 1, is_enabled=False, **dates)
    head, fetch, gone = locktasks("schedules").splitlines()
    assert head.split("  ")[0] == "TASK"
    assert fetch.split() == [
        *("a.fetch", "every", "60", "s", "2030-01-01", "00:00:00+0000", "2029-12-31", "00:00:00+0000"),
        *(str(row.pk), "FAILED"),
    ]
    assert gone.split() == ["b.gone?", "every", "60", "s", "disabled", "-", str(row.pk + 1), "-"]
    first, second = json.loads(locktasks("schedules", "--json"))
    assert (first["task_path"], first["last_status"], second["last_status"]) == ("a.fetch", "FAILED", None)
