"""What ``AdvisoryLock.objects`` and ``Lease.objects`` offer."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.db import connections, models
from django.db.models import F, Q
from django.db.models.functions import Greatest, Now

from django_pglock.conf import get_settings
from django_pglock.errors import LockKeyError
from django_pglock.keys import make_key

# Only a session that still holds or waits for an advisory lock of this database is ended, because another process may
# have got the process id since.
TERMINATE = "SELECT pg_terminate_backend(pid) FROM {view} WHERE pid = %s LIMIT 1"


class AdvisoryLockQuerySet(models.QuerySet[Any]):
    """Advisory locks of this database."""

    def held(self) -> AdvisoryLockQuerySet:
        """Return the locks that are held."""
        return self.filter(is_granted=True)

    def waiting(self) -> AdvisoryLockQuerySet:
        """Return the locks that a session waits for."""
        return self.filter(is_granted=False)

    def for_name(self, *parts: Any) -> AdvisoryLockQuerySet:
        """Return the locks of this name; ``parts`` as for ``lock``. Raises ``LockKeyError``."""
        return self.filter(key=make_key(*parts).number)

    def search(self, text: str) -> AdvisoryLockQuerySet:
        """Return the locks that match a text: the beginning of a name, a key, or the process id of a session."""
        if not text.isprintable():
            return self.none()
        meant = Q(name__startswith=text)
        with suppress(LockKeyError):
            meant |= Q(key=make_key(text).number)
        with suppress(ValueError):
            # A key without a name is shown as #5.
            number = int(text.removeprefix("#"))
            if abs(number) < 2**63:
                meant |= Q(key=number)
            if abs(number) < 2**31 and not text.startswith("#"):
                meant |= Q(pid=number)
        return self.filter(meant)

    def terminate(self, pid: int) -> bool:
        """End the session ``pid`` if it holds or waits for an advisory lock here. Return whether it was ended."""
        connection = connections[self.db]
        view = connection.ops.quote_name(self.model._meta.db_table)
        with connection.cursor() as cursor:
            cursor.execute(TERMINATE.format(view=view), (pid,))
            row = cursor.fetchone()
        return bool(row and row[0])


class AdvisoryLockManager(models.Manager.from_queryset(AdvisoryLockQuerySet)):  # type: ignore[misc]
    """The manager of ``AdvisoryLock``. It reads from the database in which locks are taken.

    A router may send reads to a standby, but a standby has its own lock table, without these locks.
    """

    def get_queryset(self) -> AdvisoryLockQuerySet:
        """Return the locks of the database ``USING``, or of the one that ``using`` or ``db_manager`` has named."""
        return super().get_queryset().using(self._db or get_settings().USING)  # type: ignore[no-any-return]


#: The conditions that a lease is held, and that it was released but cannot be acquired yet.
IS_HELD = (Q(expires_at__isnull=True) | Q(expires_at__gt=Now())) & Q(released_at__isnull=True)
IS_KEPT = Q(expires_at__gt=Greatest(Now(), F("released_at")), released_at__isnull=False)


class LeaseQuerySet(models.QuerySet[Any]):
    """Leases."""

    def held(self) -> LeaseQuerySet:
        """Return the leases that are held."""
        return self.filter(IS_HELD)

    def with_state(self) -> LeaseQuerySet:
        """Add ``server_time``, and by it ``is_held`` and ``is_kept``. The clock of the host may differ.

        ``is_kept``: the lease was released before its ``min_hold`` has passed, so no owner can acquire it yet.
        """
        leases: LeaseQuerySet = self.annotate(server_time=Now(), is_held=IS_HELD, is_kept=IS_KEPT)
        return leases

    def free(self) -> int:
        """Revoke leases. Their holders notice this at their next renewal. Returns the number of leases."""
        return self.held().update(released_at=Now(), expires_at=Now())


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """The manager of ``Lease``."""
