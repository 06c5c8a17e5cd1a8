"""Tools for the tests of projects: see and run the enqueued tasks, hold a lock in another session, and assert locks.

``using`` is a database alias everywhere. The default is the setting ``USING`` for locks and, for tasks, the database of
the backends in ``TASKS``.
"""

from __future__ import annotations

from django_pglock.testing.calls import EnqueuedCall, enqueued, make_context, patch_enqueue
from django_pglock.testing.locks import assert_locked, assert_no_locks, assert_not_locked, hold, locks_disabled
from django_pglock.testing.steps import StepsRun, run_steps
from django_pglock.testing.tasks import TaskRun, run_tasks

__all__ = [
    "EnqueuedCall",
    "StepsRun",
    "TaskRun",
    "assert_locked",
    "assert_no_locks",
    "assert_not_locked",
    "enqueued",
    "hold",
    "locks_disabled",
    "make_context",
    "patch_enqueue",
    "run_steps",
    "run_tasks",
]
