"""Retry, Snooze, Cancel: what a function says about how its task goes on."""

from __future__ import annotations

import math

import pytest

from django_pglock import Cancel, Retry, Snooze
from django_pglock.errors import TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.tasks.compat import TaskResultStatus, task_finished
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def finished(result, eventually):
    return eventually(lambda: Task.objects.filter(pk=result.id, finished_at__isnull=False).first())


@pytest.mark.parametrize("after", [0, 0.05])
def test_retry_spends_an_attempt_whatever_retry_on_says(worker, eventually, after):
    worker()
    row = finished(tasks.say.enqueue("retry", times=2, after=after), eventually)
    assert (row.status, row.attempts, row.retries, row.result) == ("SUCCESSFUL", 3, 2, 2)
    assert [attempt.exception_path for attempt in Attempt.objects.filter(task=row)] == [
        "django_pglock.tasks.flow.Retry"
    ] * 2
    assert "not yet" in Attempt.objects.filter(task=row).first().traceback


def test_retry_without_an_attempt_left_is_a_failure(worker, eventually):
    worker()
    row = finished(tasks.say.using(max_attempts=2).enqueue("retry", times=9), eventually)
    assert (row.status, row.attempts, row.retries) == ("FAILED", 2, 1)


@pytest.mark.parametrize("after", [0, 0.05])
def test_snooze_spends_nothing(worker, eventually, after):
    worker()
    row = finished(tasks.say.using(max_attempts=1).enqueue("snooze", times=4, after=after), eventually)
    assert (row.status, row.attempts, row.retries, row.result) == ("SUCCESSFUL", 5, 0, 4)
    assert not Attempt.objects.exists()


@pytest.mark.parametrize("suffix", ["", "_atomically", "_in_coroutine"])
def test_a_retry_that_does_not_say_when_waits_its_back_off(worker, eventually, suffix):
    """A subclass need not call our ``__init__``, as one of another exception need not."""
    worker(threads=1)
    row = finished(getattr(tasks, f"raise_own_retry{suffix}").enqueue(), eventually)
    assert (row.status, row.attempts, row.retries) == ("FAILED", 2, 1)
    assert row.failures.first().exception_path == "tests.sample.tasks.OwnRetry"


def test_a_snooze_that_does_not_say_for_how_long_waits_a_minute(worker, eventually):
    worker()
    result = tasks.raise_own_snooze.enqueue()
    row = eventually(lambda: Task.objects.filter(pk=result.id, status="SCHEDULED").first())
    assert 55 < (row.run_after - row.last_attempted_at).total_seconds() < 65


def test_cancel_ends_the_task_and_says_why(worker, eventually):
    heard = []
    task_finished.connect(receiver := lambda sender, task_result, **kwargs: heard.append(task_result))
    try:
        worker()
        result = tasks.say.enqueue("cancel")
        row = finished(result, eventually)
        eventually(lambda: heard)
    finally:
        task_finished.disconnect(receiver)
    assert (row.status, row.attempts) == ("CANCELLED", 1)
    assert "withdrawn" in Attempt.objects.get(task=row).traceback
    result.refresh()
    assert result.status == heard[0].status == TaskResultStatus.FAILED
    assert result.errors[0].exception_class_path == "django_pglock.tasks.flow.Cancel"


def test_in_an_atomic_function_effects_are_rolled_back(worker, eventually):
    worker()
    cancelled, snoozed = tasks.say_atomically.enqueue("cancel"), tasks.say_atomically.enqueue("snooze")
    assert finished(cancelled, eventually).status == "CANCELLED"
    eventually(lambda: Task.objects.filter(pk=snoozed.id, status="SCHEDULED", run_after__isnull=False).exists())
    assert not Effect.objects.exists()


def test_in_a_coroutine(worker, eventually):
    worker()
    assert finished(tasks.say_in_coroutine.enqueue(), eventually).status == "CANCELLED"


@pytest.mark.parametrize("after", [-1, math.nan, "1", True])
def test_a_time_that_is_none_is_refused_where_it_is_written(after):
    for word in (Retry, Snooze):
        with pytest.raises(TaskOptionError, match="after"):
            word(after=after)
    assert Cancel("why").args == ("why",)
