"""The task of a log record, also of records that the project's own code and other packages make while a task runs::

LOGGING = {
    "filters": {"task": {"()": "django_pglock.contrib.logs.TaskFilter"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["task"], ...}},
    ...
}
"""

from __future__ import annotations

import logging

from django_pglock.tasks.claim import LOG_FIELDS, running_claim

_NO_TASK = dict.fromkeys(LOG_FIELDS)


class TaskFilter(logging.Filter):
    """Gives each record ``task_id``, ``task_path``, ``queue``, ``attempt`` and ``worker``. Drops no record.

    They are those of the task that the record is about, or of the task in whose context it is made; otherwise None. A
    group call has those of its first task.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields that the record does not have."""
        claim = running_claim.get()
        for name, value in (_NO_TASK if claim is None else claim.log_fields()).items():
            record.__dict__.setdefault(name, value)
        return True
