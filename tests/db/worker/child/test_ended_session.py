"""The ends of a session in an atomic function, where Django gets its sessions from a pool, and without AUTOCOMMIT."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock.models import Attempt, Task
from tests.sample import session_tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

CLOSED, IDLE = "has closed", "idle_in_transaction_session_timeout"
#: Functions of ``session_tasks`` that end their session, and what the failure says.
WAYS = {
    "close_as_django_does": CLOSED,
    "close_psycopgs": CLOSED,
    "fail_after_close": CLOSED,
    "idle_for_too_long": IDLE,
    "hide_end_on_cursor": IDLE,
    "close_after_idle": IDLE,
}


@pytest.fixture(params=["pool", "without autocommit"])
def other_settings(request, change_settings):
    if request.param == "pool":
        change_settings(CONN_MAX_AGE=0, OPTIONS={**connection.settings_dict["OPTIONS"], "pool": True})
    else:
        change_settings(AUTOCOMMIT=False)


@pytest.mark.usefixtures("other_settings")
def test_a_function_that_ends_its_session_uses_up_its_attempts(worker, finished):
    worker(threads=1)
    for number, (how, says) in enumerate(WAYS.items(), 1):
        result = session_tasks.end_session_by.enqueue(how)
        assert finished(result).status == "FAILED", how
        assert Task.objects.get(pk=result.id).attempts == 2, how
        rows = list(Attempt.objects.filter(task_id=result.id))
        assert [each.outcome for each in rows] == ["FAILED", "FAILED"], how
        assert all(says in each.traceback for each in rows), how
        assert finished(session_tasks.write.enqueue()).status == "SUCCESSFUL", how
        assert list(Effect.objects.values_list("name", flat=True)) == ["atomic"] * number, how


@pytest.mark.usefixtures("other_settings")
def test_a_function_that_closes_a_lost_session_has_not_failed(worker, finished):
    result = session_tasks.close_after_cut.enqueue()
    worker(threads=1)
    assert finished(result).status == "SUCCESSFUL"
    assert list(Attempt.objects.values_list("outcome", flat=True)) == ["LOST"]
    assert Effect.objects.count() == 1
