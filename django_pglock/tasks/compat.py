"""``django.tasks`` if Django has it (6.0 and later), the ``django-tasks`` backport on 5.2.

The choice depends on Django's version, not on the installed packages. The two packages share no classes. So a result of
the wrong package would fail each ``isinstance``, and its signals would have no receivers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import django

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskError
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
else:
    # Checks and signal receivers register on import, as they do in Django 6, also without "django_tasks" in
    # INSTALLED_APPS.
    import django_tasks.exceptions as _exceptions
    from django_tasks import TaskContext, TaskResult, TaskResultStatus, task_backends
    from django_tasks import checks as _checks  # noqa: F401
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskError
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

    # The backport's main branch has renamed it to Django's name; its releases have not.
    InvalidTask = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError

__all__ = [
    "BaseTaskBackend",
    "InvalidTask",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultStatus",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]
