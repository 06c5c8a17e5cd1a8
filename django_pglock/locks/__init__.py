"""The locks room: advisory locks by name, for code and for views."""

from django_pglock.locks.api import lock, lock_all, semaphore, try_lock
from django_pglock.locks.handle import Handle
from django_pglock.locks.leases.lease import Lease, leader
from django_pglock.locks.table import lock_table, lock_timeout
from django_pglock.locks.views import lock_view

__all__ = [
    "Handle",
    "Lease",
    "leader",
    "lock",
    "lock_all",
    "lock_table",
    "lock_timeout",
    "lock_view",
    "semaphore",
    "try_lock",
]
