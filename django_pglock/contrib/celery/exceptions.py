"""The exceptions of Celery, by their names there."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from django_pglock.errors import TaskStopped
from django_pglock.tasks import retry

#: Raised in the function when its time is over, and when it was cancelled. A function may catch it to tidy up. An
#: attempt whose time was over is never a success.
SoftTimeLimitExceeded = TaskStopped
TimeoutError = TimeoutError  # noqa: A001, PLW0127 - a name of celery.exceptions


class MaxRetriesExceededError(Exception):
    """``retry()`` was called in the last attempt, without an exception to raise instead."""


class TaskRevokedError(Exception):
    """The result of a task that was cancelled, has expired, or was to run after a task that has failed."""


class NotRegistered(KeyError):
    """No task has this name, or its module is not imported."""


class Retry(retry.Retry):
    """Raised by ``retry()``: the task runs again at ``when``, a date or a number of seconds, because of ``exc``."""

    def __init__(self, message: str | None = None, exc: BaseException | None = None, when: Any = None) -> None:
        after = (when - datetime.now(timezone.utc)).total_seconds() if isinstance(when, datetime) else when
        text = message or (f"because of {exc!r}" if exc else "")
        super().__init__(text, after=None if after is None else max(0.0, float(after)))
        self.exc = exc
        self.when = when


class Ignore(retry.Cancel):
    """Raised in a function: the task ends as cancelled, and none of its hooks is called."""

    state = "IGNORED"


class Reject(Ignore):
    """The same. With ``requeue`` the task runs again at once, as if it had not begun."""

    state = "REJECTED"

    def __new__(cls, reason: Any = None, requeue: bool = False) -> Any:
        return retry.Snooze(0) if requeue else super().__new__(cls, reason)
