"""Who holds which lease, and how a lease is taken away from its holder."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class LeaseQuerySet(models.QuerySet[Any]):
    """Leases."""

    def held(self) -> LeaseQuerySet:
        """Leases that are held."""
        return self.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()), released_at__isnull=True)

    def with_server_time(self) -> LeaseQuerySet:
        """Add ``server_time``: the server's clock decides whether a lease has expired, and the host's may differ."""
        leases: LeaseQuerySet = self.annotate(server_time=Now())
        return leases

    def free(self) -> int:
        """Take leases away from their holders, who notice at their next renewal. Returns the number of leases."""
        return self.held().update(released_at=Now(), expires_at=Now())


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """The manager of ``Lease``."""
