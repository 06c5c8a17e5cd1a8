"""Background tasks and locks for Django, on PostgreSQL alone.

Importing this package touches no database, no settings and no model, so its decorators work in any module. A name is
imported when it is first used: a project that uses only locks needs no task backend, and the reverse.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Type checkers read the names in __all__ of each module, Python reads them in _NAMES; a test compares the two.
    from django_pglock.errors import *  # noqa: F403
    from django_pglock.locks.api import *  # noqa: F403
    from django_pglock.locks.leases import *  # noqa: F403
    from django_pglock.locks.table import *  # noqa: F403
    from django_pglock.locks.views import *  # noqa: F403
    from django_pglock.postgres.notifications import *  # noqa: F403
    from django_pglock.store.claim_manager import *  # noqa: F403
    from django_pglock.store.steps import *  # noqa: F403
    from django_pglock.tasks import *  # noqa: F403

__version__ = "0.1.0"

#: The public names of each module.
_NAMES = {
    "errors": "DuplicateTask EventTimeout LockError LockKeyError LockLost LockNotAvailable LockScopeError PGLockError "
    "StepFailed TaskCancelled TaskTimeout",
    "locks.api": "lock lock_all semaphore try_lock",
    "locks.leases": "Lease leader",
    "locks.table": "lock_table lock_timeout",
    "locks.views": "lock_view",
    "postgres.notifications": "listen notify",
    "store.claim_manager": "ClaimManager ClaimQuerySet",
    "store.steps": "emit",
    "tasks": "Calls Cancel Exponential Group Linear Rate Retry Snooze TaskContext Unique aenqueue_many enqueue_many "
    "task",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = list(_MODULES)


if not TYPE_CHECKING:  # or type checkers would take every name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
