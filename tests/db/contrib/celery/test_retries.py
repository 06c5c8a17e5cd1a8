"""``retry()``, ``autoretry_for`` and the hooks of base classes: how often, after which delay, and in which order."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from django_pglock.contrib.celery import Ignore, MaxRetriesExceededError, Reject, Retry, Task, shared_task
from django_pglock.models import Attempt
from django_pglock.models import Task as Row
from django_pglock.testing import run_tasks

pytestmark = pytest.mark.django_db
calls = []


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


@shared_task(bind=True, default_retry_delay=7)
def retries_by_itself(self, **options):
    calls.append(self.request.retries)
    raise self.retry(**options)


@shared_task(bind=True, max_retries=2)
def with_error(self):
    try:
        raise OSError("away")
    except OSError as error:
        self.retry(exc=error, countdown=1)


@shared_task(autoretry_for=(OSError,), max_retries=4, retry_backoff=3, retry_jitter=False)
def backs_off():
    calls.append(1)
    raise OSError


@shared_task(
    autoretry_for=(Exception,), dont_autoretry_for=(KeyError,), retry_kwargs={"max_retries": 1, "countdown": 9}
)
def not_for_keys(error):
    raise {"key": KeyError, "value": ValueError}[error]


@shared_task(bind=True, max_retries=1)
def goes_on(self):
    if not self.request.retries:
        error = self.retry(countdown=1, throw=False)
        assert isinstance(error, Retry)
    calls.append(self.request.retries)
    return "done"


def delays():
    """Run all attempts, and return the delays between them in seconds."""
    found = []
    while run_tasks(until="due") and (row := Row.objects.filter(status="SCHEDULED").first()):
        failed = Attempt.objects.latest("number")
        found.append(round((row.run_after - failed.finished_at).total_seconds()))
        Row.objects.filter(pk=row.pk).run_now()
    return found


def test_retry_waits_for_the_default_and_ends_after_three():
    result = retries_by_itself.delay()
    assert delays() == [7, 7, 7]
    assert calls == [0, 1, 2, 3]
    assert Row.objects.get().status == "FAILED"
    with pytest.raises(MaxRetriesExceededError, match="has been retried 3 times"):
        result.get()


@pytest.mark.parametrize(("most", "attempts"), [(0, 1), (1, 2), (5, 6)])
def test_a_call_of_retry_may_have_another_limit(most, attempts):
    retries_by_itself.delay(max_retries=most)
    run_tasks()
    assert len(calls) == attempts


def test_without_a_limit_it_is_retried_on_and_on():
    @local(bind=True, max_retries=None)
    def endless(self):
        calls.append(1)
        if len(calls) < 40:
            self.retry(countdown=0)

    endless.delay()
    assert {each.outcome for each in run_tasks()} == {"retried", "succeeded"}
    assert len(calls) == 40


def local(**options):
    def decorate(function):
        function.__qualname__ = function.__name__
        return shared_task(**options)(function)

    return decorate


def test_after_the_last_retry_the_exception_of_the_function_is_raised():
    result = with_error.delay()
    assert delays() == [1, 1]
    with pytest.raises(OSError, match="away"):
        result.get()
    assert [*Attempt.objects.order_by("number").values_list("exception_path", flat=True)] == [
        "django_pglock.contrib.celery.exceptions.Retry",
        "django_pglock.contrib.celery.exceptions.Retry",
        "builtins.OSError",
    ]


def test_backoff_doubles_from_its_factor():
    backs_off.delay()
    assert delays() == [3, 6, 12, 24]


def test_jitter_is_at_most_the_backoff(monkeypatch):
    seen = []
    monkeypatch.setattr("django_pglock.contrib.celery.task.randrange", lambda stop: seen.append(stop) or 1)
    monkeypatch.setattr(backs_off, "retry_jitter", True)
    monkeypatch.setattr(backs_off, "retry_backoff_max", 10)
    backs_off.delay()
    assert delays() == [1, 1, 1, 1]
    assert seen == [4, 7, 11, 11, 11]


def test_some_exceptions_are_not_retried():
    not_for_keys.delay("key")
    not_for_keys.delay("value")
    assert [each.outcome for each in run_tasks()] == ["failed", "retried", "failed"]


def test_a_retry_of_a_person_begins_to_count_again():
    not_for_keys.delay("value")
    run_tasks()
    Row.objects.all().retry()
    assert [each.outcome for each in run_tasks()] == ["retried", "failed"]


def test_without_throw_the_function_goes_on_and_is_retried():
    result = goes_on.delay()
    run_tasks(raise_errors=True)
    assert calls == [0, 1]
    assert result.get() == "done"


def test_retry_at_a_date():
    eta = datetime.now(timezone.utc) + timedelta(days=3)

    @local(bind=True)
    def later(self):
        self.retry(eta=eta)

    later.delay()
    run_tasks(until="due")
    assert abs(Row.objects.get().run_after - eta) < timedelta(seconds=30)


def test_a_direct_call_raises_the_exception_itself():
    with pytest.raises(OSError, match="away"):
        with_error()
    with pytest.raises(Retry):
        retries_by_itself()


@shared_task(bind=True, max_retries=2)
def one_by_one(self, numbers, throw=False):
    calls.append((numbers, self.request.retries))
    for number in numbers:
        if number > 1:
            self.retry(([number], throw), {}, countdown=5, throw=throw)


def test_a_retry_with_other_arguments_is_another_task():
    result = one_by_one.delay([1, 2, 3])
    run_tasks()
    assert (result.state, calls[0]) == ("SUCCESS", ([1, 2, 3], 0))
    assert sorted(calls[1:]) == [([2], 1), ([2], 2), ([3], 1), ([3], 2)]
    assert sorted(Row.objects.values_list("status", flat=True)) == ["FAILED", "FAILED", *["SUCCESSFUL"] * 1]


def test_with_throw_it_replaces_this_one():
    result = one_by_one.delay([1, 2], throw=True)
    run_tasks()
    assert (result.state, calls) == ("REVOKED", [([1, 2], 0), ([2], 1), ([2], 2)])


# Hooks


class Hooked(Task):
    """A base as projects have it."""

    abstract = True
    max_retries = 1
    default_retry_delay = 5

    def before_start(self, task_id, args, kwargs):
        calls.append(("before_start", task_id, args, kwargs))

    def on_success(self, retval, task_id, args, kwargs):
        calls.append(("on_success", retval, task_id, args, kwargs))

    def on_retry(self, exc, task_id, args, kwargs, einfo):
        calls.append(("on_retry", exc, task_id, args, kwargs, str(einfo)))

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        calls.append(("on_failure", exc, task_id, args, kwargs, str(einfo)))

    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        calls.append(("after_return", status, retval, task_id))


@shared_task(base=Hooked, autoretry_for=(ValueError,))
def hooked(error=None):
    if error:
        raise {"value": ValueError, "key": KeyError, "ignore": Ignore, "reject": Reject}[error]("why")
    return 3


def names():
    return [each[0] for each in calls]


def test_hooks_of_a_success_in_order():
    result = hooked.delay()
    run_tasks()
    assert calls == [
        ("before_start", result.id, [], {}),
        ("on_success", 3, result.id, [], {}),
        ("after_return", "SUCCESS", 3, result.id),
    ]


def test_hooks_of_retries_and_of_the_last_failure():
    hooked.delay("value")
    run_tasks()
    assert names() == ["before_start", "on_retry", "before_start", "on_failure", "after_return"]
    _, exc, _, args, _, einfo = calls[1]
    assert (type(exc), args) == (ValueError, ["value"])
    assert "ValueError: why" in einfo
    assert calls[4][1] == "FAILURE"


@pytest.mark.parametrize("word", ["ignore", "reject"])
def test_ignore_and_reject_end_without_hooks(word):
    result = hooked.delay(word)
    run_tasks()
    assert result.state == "REVOKED"
    assert names() == ["before_start"]


def test_a_rejected_task_may_run_again():
    @local(bind=True)
    def once(self):
        calls.append(1)
        if len(calls) == 1:
            raise Reject("later", requeue=True)

    result = once.delay()
    run_tasks()
    assert (result.state, len(calls)) == ("SUCCESS", 2)


def test_an_error_of_a_hook_after_the_outcome_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(hooked, "on_success", lambda *_: 1 / 0)
    result = hooked.delay()
    run_tasks()
    assert result.state == "SUCCESS"
    assert "ZeroDivisionError" in caplog.text


def test_an_error_before_the_start_is_one_of_the_function(monkeypatch):
    monkeypatch.setattr(hooked, "before_start", lambda *_: 1 / 0)
    hooked.delay()
    run_tasks()
    assert names() == ["on_failure", "after_return"]


def test_a_base_may_wrap_the_call():
    class Wrapping(Task):
        def __call__(self, *args, **kwargs):
            calls.append(self.request.id)
            return super().__call__(*args, **kwargs)

    @local(base=Wrapping, bind=True)
    def wrapped(self):
        calls.append((self.request.id, self.request.called_directly))

    result = wrapped.delay()
    run_tasks(raise_errors=True)
    assert calls == [result.id, (result.id, False)]
