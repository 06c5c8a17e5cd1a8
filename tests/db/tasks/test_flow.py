"""Retry, Snooze, Cancel: what a function says about how its task continues."""

from __future__ import annotations

import math

import pytest

from django_pglock import Cancel, Retry, Snooze
from django_pglock.errors import TaskArgumentsError, TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.compat import TaskContext as DjangoTaskContext
from django_pglock.tasks.compat import TaskResultStatus, task_finished
from django_pglock.tasks.options import OWN_META
from django_pglock.worker.child.attempt import Attempt as RunningAttempt
from tests.sample import running_tasks as running
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def finished(result, eventually):
    return eventually(lambda: Task.objects.filter(pk=result.id, finished_at__isnull=False).first())


def test_retry_spends_an_attempt_whatever_retry_on_says(worker, eventually):
    worker()
    for after in (0, 0.05):
        Effect.objects.all().delete()
        row = finished(tasks.say.enqueue("retry", times=2, after=after), eventually)
        assert (row.status, row.attempts, row.retries, row.result) == ("SUCCESSFUL", 3, 2, 2)
        assert [attempt.exception_path for attempt in Attempt.objects.filter(task=row)] == [
            "django_pglock.tasks.retry.Retry"
        ] * 2
        assert "not yet" in Attempt.objects.filter(task=row).first().traceback


def test_retry_without_an_attempt_left_is_a_failure(worker, eventually):
    worker()
    row = finished(tasks.say.using(max_attempts=2).enqueue("retry", times=9), eventually)
    assert (row.status, row.attempts, row.retries) == ("FAILED", 2, 1)


def test_a_snooze_uses_no_attempt_and_no_retry(worker, eventually):
    worker()
    for after in (0, 0.1):
        Effect.objects.all().delete()
        row = finished(tasks.say.using(max_attempts=1).enqueue("snooze", times=4, after=after), eventually)
        assert (row.status, row.attempts, row.retries, row.result) == ("SUCCESSFUL", 5, 0, 4)
        assert not Attempt.objects.exists()


def test_snoozes_beyond_their_limit_end_the_task(worker, eventually):
    worker()
    row = finished(tasks.say.using(max_snoozes=3).enqueue("snooze", times=3, after=0), eventually)
    assert (row.status, row.attempts) == ("SUCCESSFUL", 4)
    for after in (0, 0.1):
        Effect.objects.all().delete()
        call = tasks.say.using(max_snoozes=3, max_attempts=5)
        row = finished(call.enqueue("snooze", times=9, after=after), eventually)
        assert (row.status, row.attempts, row.retries) == ("FAILED", 4, 0)
        failure = row.failures.get()
        assert failure.exception_path == "django_pglock.errors.TooManySnoozes"
        assert "3 times" in failure.traceback
        assert "Snooze" in failure.traceback


def test_a_retried_task_may_snooze_again(worker, eventually):
    worker()
    result = tasks.say.using(max_snoozes=1, meta={"trace": "kept"}).enqueue("snooze", times=9, after=0)
    assert finished(result, eventually).attempts == 2
    Task.objects.retry()
    row = eventually(lambda: Task.objects.filter(pk=result.id, status="FAILED", attempts=4).first())
    assert row.meta["trace"] == "kept"


def test_calls_of_a_group_count_their_own_snoozes(worker, eventually, claim):
    """A call that joins the group later has all of its snoozes left."""
    first = tasks.snooze_together.enqueue(user=1)
    worker()
    assert finished(first, eventually).attempts == 3
    second = tasks.snooze_together.using(max_snoozes=4).enqueue(user=2)
    third = tasks.snooze_together.using(max_snoozes=1).enqueue(user=2)
    assert (finished(second, eventually).attempts, finished(third, eventually).attempts) == (5, 2)


def test_a_backoff_function_gets_the_failure(worker, eventually):
    tasks.asked.clear()
    worker()
    finished(tasks.fail_in_turns.enqueue(), eventually)
    assert tasks.asked == [
        ("failure 1", ["builtins.ValueError"], 1),
        ("'failure 2'", ["builtins.ValueError", "builtins.KeyError"], 2),
    ]


def test_a_backoff_function_gets_the_failure_of_each_call_of_a_group(worker, eventually):
    tasks.asked.clear()
    results = [tasks.fail_together_in_turns.enqueue() for _ in range(3)]
    worker()
    for result in results:
        finished(result, eventually)
    assert tasks.asked == [("failure 1", ["builtins.ValueError"], 1)] * 3


def test_raising_retry_without_a_wait_uses_the_backoff(worker, eventually):
    """As for other exceptions, a subclass need not call our ``__init__``."""
    worker(threads=1)
    for suffix in ("", "_atomically", "_in_coroutine"):
        row = finished(getattr(tasks, f"raise_own_retry{suffix}").enqueue(), eventually)
        assert (row.status, row.attempts, row.retries) == ("FAILED", 2, 1), suffix
        assert row.failures.first().exception_path == "tests.sample.tasks.OwnRetry"


def test_raising_snooze_without_a_wait_waits_a_minute(worker, eventually):
    worker()
    result = tasks.raise_own_snooze.enqueue()
    row = eventually(lambda: Task.objects.filter(pk=result.id, status="SCHEDULED").first())
    assert 55 < (row.run_after - row.last_attempted_at).total_seconds() < 65


def test_pauses_of_snoozes_without_a_wait_double(claim):
    """Nothing may limit the snoozes. A worker took 250 claims a second for such a task."""
    tasks.say.enqueue("snooze")
    [mine] = claim()
    attempt = RunningAttempt(mine, "default")

    def pause(uncounted, after):
        mine.uncounted = uncounted
        return attempt.failure(Snooze(after)).delay

    assert [pause(before, 0) for before in range(4)] == [0.1, 0.2, 0.4, 0.8]
    assert [pause(before, 0.01) for before in (10, 11, 10_000)] == [102.4, 120, 120]
    assert [pause(before, 0.1) for before in (0, 10_000)] == [0.1, 0.1], "as the function says"


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
    assert result.errors[0].exception_class_path == "django_pglock.tasks.retry.Cancel"


def test_cancel_and_snooze_roll_back_an_atomic_function(worker, eventually):
    worker()
    cancelled, snoozed = tasks.say_atomically.enqueue("cancel"), tasks.say_atomically.enqueue("snooze")
    assert finished(cancelled, eventually).status == "CANCELLED"
    eventually(lambda: Task.objects.filter(pk=snoozed.id, status="SCHEDULED", run_after__isnull=False).exists())
    assert not Effect.objects.exists()


def test_raising_cancel_in_a_coroutine_cancels_the_task(worker, eventually):
    worker()
    assert finished(tasks.say_in_coroutine.enqueue(), eventually).status == "CANCELLED"


@pytest.mark.parametrize("after", [-1, math.nan, "1", True])
def test_retry_and_snooze_refuse_an_invalid_wait(after):
    for word in (Retry, Snooze):
        with pytest.raises(TaskOptionError, match="after"):
            word(after=after)
    assert Cancel("why").args == ("why",)


# The context of a running task: its progress, its metadata and its token.


def test_the_task_context_extends_the_context_of_django(claim):
    tasks.nothing.using(meta={"trace": "abc", "n": [1]}, timeout=5).enqueue()
    [mine] = claim()
    context = TaskContext(task_result=None, _claims=[mine], _reason_to_stop=lambda: None)
    assert isinstance(context, DjangoTaskContext)
    assert context.meta == {"trace": "abc", "n": [1]}
    assert context.fencing_token == 1
    assert repr(context) == "TaskContext(task_result=None)", "no arguments of a call"
    context.check()
    for wrong in (float("nan"), float("inf"), object(), "\x00"):
        with pytest.raises(TaskArgumentsError):
            context.progress(wrong)
    assert mine.progress is None


def test_the_context_of_a_group_is_that_of_its_first_call(claim):
    for trace in ("first", "second"):
        tasks.nothing.using(meta={"trace": trace}).enqueue()
    claims = [*claim(), *claim()]
    claims[1].attempt = 5
    context = TaskContext(task_result=None, _claims=claims, _reason_to_stop=lambda: None)
    assert (context.meta, context.fencing_token) == ({"trace": "first"}, 1)
    context.progress(1, 2)
    assert [each.progress for each in claims] == ['{"done":1,"total":2}'] * 2
    with pytest.raises(TaskArgumentsError, match="The progress of a task"):
        context.progress(float("nan"))


@pytest.mark.parametrize("name", OWN_META)
def test_meta_refuses_the_names_that_the_package_uses(name):
    with pytest.raises(TaskOptionError, match=f"meta has {name}, which"):
        tasks.nothing.using(meta={name: "mine", "trace": "abc"})


def test_the_context_of_a_running_task_has_its_meta_and_token(worker, eventually):
    worker()
    assert finished(running.tell.using(meta={"trace": "abc"}).enqueue(1), eventually).result == {"trace": "abc"}
    assert finished(running.tell_atomically.enqueue(), eventually).result == 1


def test_the_context_has_earlier_errors_after_a_retry_by_hand(worker, eventually):
    """A retry by hand resets the count of retries, but keeps the failed attempts."""
    worker()
    result = running.errors_so_far.enqueue(2)
    for _ in range(2):
        assert finished(result, eventually).status == "FAILED"
        assert Task.objects.filter(pk=result.id).retry() == 1
    assert finished(result, eventually).result == [2, 3]
