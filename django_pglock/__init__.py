"""PostgreSQL decides who may run, for Django: advisory locks and tasks.

Importing this package touches no database, no settings and no model, so its decorators work in any module. The verbs
are loaded when first used: a project that only locks needs no task backend, and the other way round.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from django_pglock.errors import (
    DuplicateTask,
    LockError,
    LockKeyError,
    LockLost,
    LockNotAvailable,
    LockScopeError,
    PGLockError,
    TaskCancelled,
    TaskTimeout,
)

if TYPE_CHECKING:
    from django_pglock.locks import Lease as Lease
    from django_pglock.locks import leader as leader
    from django_pglock.locks import lock as lock
    from django_pglock.locks import lock_all as lock_all
    from django_pglock.locks import lock_table as lock_table
    from django_pglock.locks import lock_timeout as lock_timeout
    from django_pglock.locks import lock_view as lock_view
    from django_pglock.locks import semaphore as semaphore
    from django_pglock.locks import try_lock as try_lock
    from django_pglock.tasks import Cancel as Cancel
    from django_pglock.tasks import Constant as Constant
    from django_pglock.tasks import Exponential as Exponential
    from django_pglock.tasks import Group as Group
    from django_pglock.tasks import Linear as Linear
    from django_pglock.tasks import Rate as Rate
    from django_pglock.tasks import Retry as Retry
    from django_pglock.tasks import Snooze as Snooze
    from django_pglock.tasks import TaskContext as TaskContext
    from django_pglock.tasks import Unique as Unique
    from django_pglock.tasks import aenqueue_many as aenqueue_many
    from django_pglock.tasks import enqueue_many as enqueue_many
    from django_pglock.tasks import task as task

__version__ = "0.1.0"

__all__ = [
    "Cancel",
    "Constant",
    "DuplicateTask",
    "Exponential",
    "Group",
    "Lease",
    "Linear",
    "LockError",
    "LockKeyError",
    "LockLost",
    "LockNotAvailable",
    "LockScopeError",
    "PGLockError",
    "Rate",
    "Retry",
    "Snooze",
    "TaskCancelled",
    "TaskContext",
    "TaskTimeout",
    "Unique",
    "aenqueue_many",
    "enqueue_many",
    "leader",
    "lock",
    "lock_all",
    "lock_table",
    "lock_timeout",
    "lock_view",
    "semaphore",
    "task",
    "try_lock",
]

_ROOMS = {
    "Cancel": "django_pglock.tasks",
    "Retry": "django_pglock.tasks",
    "Snooze": "django_pglock.tasks",
    "TaskContext": "django_pglock.tasks",
    "aenqueue_many": "django_pglock.tasks",
    "enqueue_many": "django_pglock.tasks",
    "Constant": "django_pglock.tasks",
    "Exponential": "django_pglock.tasks",
    "Linear": "django_pglock.tasks",
    "Unique": "django_pglock.tasks",
    "Rate": "django_pglock.tasks",
    "Group": "django_pglock.tasks",
    "Lease": "django_pglock.locks",
    "leader": "django_pglock.locks",
    "lock": "django_pglock.locks",
    "lock_all": "django_pglock.locks",
    "lock_table": "django_pglock.locks",
    "lock_timeout": "django_pglock.locks",
    "lock_view": "django_pglock.locks",
    "semaphore": "django_pglock.locks",
    "try_lock": "django_pglock.locks",
    "task": "django_pglock.tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOMS})
