"""The task of a log record, also of records that the project's own code and other packages make while a task runs::

LOGGING = {
    "filters": {"task": {"()": "django_pglock.contrib.logs.TaskFilter"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["task"], ...}},
    ...
}
"""

from __future__ import annotations

import logging
from contextvars import ContextVar, Token
from typing import Any

from django_pglock.tasks import instrumentation
from django_pglock.tasks.claim import LOG_FIELDS
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import AttemptInfo, EnqueueObserver, RunObserver

_fields: ContextVar[dict[str, Any]] = ContextVar("django_pglock_log_fields")
_NO_TASK = dict.fromkeys(LOG_FIELDS)


class TaskFilter(logging.Filter):
    """Gives each record ``task_id``, ``task_path``, ``queue``, ``attempt`` and ``worker``. Drops no record.

    They are those of the task that the record is about, or of the task in whose context it is made; otherwise None. A
    group call has those of its first task.
    """

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        instrumentation.add(CurrentTask())

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields that the record does not have."""
        for name, value in _fields.get(_NO_TASK).items():
            record.__dict__.setdefault(name, value)
        return True


class CurrentTask:
    """The instrument: notes which task runs in a thread or in a coroutine."""

    name = "logs"

    def enqueuing(self, task: TaskFields) -> EnqueueObserver:
        """Do nothing, because only running attempts are noted."""
        return EnqueueObserver()

    def running(self, attempt: AttemptInfo) -> RunObserver:
        """Note the task until its attempt ends."""
        return RunningTaskFields(_fields.set(attempt.claims[0].log_fields()))


class RunningTaskFields(RunObserver):
    """An attempt that is noted."""

    def __init__(self, token: Token[dict[str, Any]]) -> None:
        self.token = token

    def ended(self, outcome: Any) -> None:
        """Note that no task runs here."""
        _fields.reset(self.token)
