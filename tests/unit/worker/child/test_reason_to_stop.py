"""When and why an attempt must stop, and which error is recorded for it."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from django_pglock import Cancel, Retry, Snooze
from django_pglock.errors import TaskCancelled, TaskStopped, TaskTimeout
from django_pglock.worker.child.attempt import Attempt


def attempt(*, is_cancelled=False, is_overdue=False, timeout=5.0):
    made = Attempt.__new__(Attempt)
    made.claim, made.timeout = SimpleNamespace(is_cancelled=is_cancelled), timeout
    made.deadline = time.monotonic() - 1 if is_overdue else math.inf
    return made


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
    assert overdue.reason_of(error) is error
    assert type(attempt(is_cancelled=True).reason_of(error)) is TaskCancelled, "a cancel is not its decision"


@pytest.mark.parametrize("state", [{"is_overdue": True}, {"is_cancelled": True}])
def test_what_stops_a_function_is_no_exception_that_it_catches_by_habit(state):
    """But what is recorded is one, so that retry options apply. Its cause is the error that the stop has replaced."""
    stopped, cancelled = attempt(**state), ValueError("canceling statement due to user request")
    with pytest.raises(TaskStopped) as raised:
        try:
            raise cancelled
        finally:
            stopped.check()
    assert not isinstance(raised.value, Exception)
    recorded = stopped.reason_of(raised.value)
    assert recorded is raised.value.reason
    assert isinstance(recorded, TaskTimeout | TaskCancelled)
    assert recorded.__cause__ is cancelled
    assert recorded.__traceback__ is raised.tb
    assert stopped.reason_of(recorded) is recorded
