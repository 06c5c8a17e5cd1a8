"""When and why an attempt must stop, and which error is recorded for it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from django_pglock import Cancel, Retry, Snooze
from django_pglock.errors import TaskCancelled, TaskTimeout
from django_pglock.worker.running.stoppable import StoppableAttempt

TOO_LONG = "The attempt took longer than its timeout of 5 s."


def attempt(*, is_cancelled=False, is_overdue=False, timeout=5.0):
    made = StoppableAttempt()
    made.claim, made.timeout = SimpleNamespace(is_cancelled=is_cancelled), timeout
    made.deadline = time.monotonic() - 1 if is_overdue else math.inf
    return made


def test_a_cancelled_task_does_not_begin():
    with pytest.raises(TaskCancelled):
        (cancelled := attempt(is_cancelled=True)).begin()
    assert cancelled.began is None


@pytest.mark.parametrize("timeout", [None, 0.0, 1000.0])
def test_the_time_of_an_attempt_begins_with_the_call_of_its_function(timeout):
    begun = attempt(timeout=timeout)
    begun.begin()
    assert begun.deadline == (math.inf if timeout is None else begun.began + timeout)
    assert begun.is_overdue is (timeout == 0)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({}, None),
        ({"is_overdue": True}, TaskTimeout),
        ({"is_cancelled": True}, TaskCancelled),
        ({"is_cancelled": True, "is_overdue": True}, TaskCancelled),
    ],
)
def test_the_reason_for_a_stop_is_recorded_with_the_exception_of_the_function_as_its_cause(state, reason):
    """The function may have turned the error of a cancelled statement into one of its own."""
    stopped, error = attempt(**state), ValueError("in the middle of stopping")
    recorded, asked = stopped.reason_of(error), stopped.reason_to_stop()
    if reason is None:
        assert recorded is error
        assert asked is None
    else:
        assert type(recorded) is type(asked) is reason
        assert recorded.__cause__ is error


@pytest.mark.parametrize("error", [Retry("later"), Snooze(5), Cancel(), TaskTimeout("of the function's own")])
def test_a_function_whose_time_is_over_still_decides_how_its_task_continues(error):
    overdue = attempt(is_overdue=True)
    overdue.is_stop_sent = True
    before = error.args
    assert overdue.reason_of(error) is error
    assert error.args == before
    assert type(attempt(is_cancelled=True).reason_of(error)) is TaskCancelled, "a cancel is not its decision"


@pytest.mark.parametrize(("is_stop_sent", "text"), [(True, TOO_LONG), (False, str(TaskTimeout()))])
def test_only_the_timeout_that_was_sent_into_the_thread_gets_the_number_of_seconds(is_stop_sent, text):
    """Only a class can be sent, and no message. Another one of this class is the function's own."""
    overdue, error = attempt(is_overdue=True), TaskTimeout()
    overdue.is_stop_sent = is_stop_sent
    assert str(overdue.reason_of(error)) == text


def test_a_cancel_that_the_function_has_passed_on_is_not_wrapped():
    error = TaskCancelled("asked by the function")
    assert attempt(is_cancelled=True, is_overdue=True).reason_of(error) is error
