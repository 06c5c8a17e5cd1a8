"""Celery's decorators and calls over the tasks of this package, so that a project moves to ``@task`` file by file.

Change ``from celery import …`` to ``from django_pglock.contrib.celery import …``, and add
``"django_pglock.contrib.celery"`` to ``INSTALLED_APPS``. The names and the modules are those of Celery. An option
without an equivalent is refused, with an error that says what to write.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: The names of each module. A name is imported when it is first used.
_NAMES = {
    "app": "Celery current_app get_task_logger install shared_task",
    "canvas": "Signature chain chord group signature subtask",
    "exceptions": "Ignore MaxRetriesExceededError Reject Retry SoftTimeLimitExceeded",
    "result": "AsyncResult EagerResult GroupResult",
    "schedules": "crontab",
    "task": "Task current_task",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"django_pglock.contrib.celery has no {name!r} of Celery.")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
