"""Tools for the tests of projects: run the enqueued tasks, hold a lock in another session, and assert which are held.

``using`` is a database alias everywhere. The default is the setting ``USING`` for locks and, for tasks, the database of
the backends in ``TASKS``.
"""

from __future__ import annotations

from django_pglock.testing.locks import assert_locked, assert_no_locks, assert_not_locked, hold, locks_disabled
from django_pglock.testing.tasks import TaskRun, run_tasks

__all__ = [
    "TaskRun",
    "assert_locked",
    "assert_no_locks",
    "assert_not_locked",
    "hold",
    "locks_disabled",
    "run_tasks",
]
