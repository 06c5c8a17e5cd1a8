"""Who has which lease: what may be asked of, and done to, their rows from outside."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class LeaseQuerySet(models.QuerySet[Any]):
    """Leases."""

    def held(self) -> LeaseQuerySet:
        """Leases that somebody has."""
        return self.filter(Q(expires_at__isnull=True) | Q(expires_at__gt=Now()), released_at__isnull=True)

    def free(self) -> int:
        """Take leases away from their holders, who notice it at their next renewal. Returns how many."""
        return self.held().update(released_at=Now(), expires_at=Now())


class LeaseManager(models.Manager.from_queryset(LeaseQuerySet)):  # type: ignore[misc]
    """The manager of ``Lease``."""
