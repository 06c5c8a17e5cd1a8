"""The holders of leases, and the revocation of leases."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Greatest, Now

#: The conditions that a lease is held, and that it was released but cannot be acquired yet.
IS_HELD = (Q(expires_at__isnull=True) | Q(expires_at__gt=Now())) & Q(released_at__isnull=True)
IS_KEPT = Q(expires_at__gt=Greatest(Now(), F("released_at")), released_at__isnull=False)


class LeaseQuerySet(models.QuerySet[Any]):
    """Leases."""

    def held(self) -> LeaseQuerySet:
        """Return the leases that are held."""
        return self.filter(IS_HELD)

    def with_server_time(self) -> LeaseQuerySet:
        """Add ``server_time``. The server's clock decides whether a lease has expired; the host's clock may differ."""
        leases: LeaseQuerySet = self.annotate(server_time=Now())
        return leases

    def with_state(self) -> LeaseQuerySet:
        """Add ``server_time``, and by it ``is_held`` and ``is_kept``.

        ``is_kept``: the lease was released before its ``min_hold`` has passed, so no owner can acquire it yet.
        """
        leases: LeaseQuerySet = self.with_server_time().annotate(is_held=IS_HELD, is_kept=IS_KEPT)
        return leases

    def free(self) -> int:
        """Revoke leases. Their holders notice this at their next renewal. Returns the number of leases."""
        return self.held().update(released_at=Now(), expires_at=Now())


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """The manager of ``Lease``."""
