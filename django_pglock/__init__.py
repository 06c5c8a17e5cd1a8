"""PostgreSQL decides who may run, for Django: advisory locks and tasks.

Importing this package touches no database, no settings and no model, so its decorators work in any module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django_pglock.errors import (
    LockError,
    LockKeyError,
    LockLost,
    LockNotAvailable,
    LockScopeError,
    PGLockError,
)

__version__ = "0.1.0"

__all__ = [
    "LockError",
    "LockKeyError",
    "LockLost",
    "LockNotAvailable",
    "LockScopeError",
    "PGLockError",
]
