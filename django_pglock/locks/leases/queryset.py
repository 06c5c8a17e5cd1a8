"""The holders of leases, and the revocation of leases."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class LeaseQuerySet(models.QuerySet[Any]):
    """Leases."""

    def held(self) -> LeaseQuerySet:
        """Return the leases that are held."""
        return self.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()), released_at__isnull=True)

    def with_server_time(self) -> LeaseQuerySet:
        """Add ``server_time``. The server's clock decides whether a lease has expired; the host's clock may differ."""
        leases: LeaseQuerySet = self.annotate(server_time=Now())
        return leases

    def free(self) -> int:
        """Revoke leases. Their holders notice this at their next renewal. Returns the number of leases."""
        return self.held().update(released_at=Now(), expires_at=Now())


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """The manager of ``Lease``."""
