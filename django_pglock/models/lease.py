"""The leases: who holds which lease until when, and the token of the last holder."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_pglock.locks.leases.queryset import LeaseManager
from django_pglock.models.base import NotDumped, OnPostgreSQL


class _DefaultManager(NotDumped, LeaseManager):
    pass


class _Duration(models.DurationField):  # type: ignore[type-arg]  # Django's class takes no arguments when it runs
    """Is read as a number of seconds. psycopg reads intervals only if ``IntervalStyle`` is ``postgres``."""

    def select_format(self, compiler: Any, sql: str, params: Any) -> tuple[str, Any]:
        """Return the expression for the list of a SELECT. A subquery returns intervals, for the query around it."""
        return (sql if compiler.query.subquery else f"EXTRACT(epoch FROM {sql})"), params

    def from_db_value(self, value: Decimal | timedelta | None, expression: Any, connection: Any) -> timedelta | None:
        """Return the duration. Of raw queries and of RETURNING the value is an interval."""
        return timedelta(microseconds=int(value * 1_000_000)) if isinstance(value, Decimal) else value

    def deconstruct(self) -> Any:
        """Return the field for migrations: the column is that of Django's field."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DurationField", args, kwargs


class Lease(models.Model):
    """One lease. The row stays after the lease is released, because the next token has to be larger.
    After ``delete()`` of the row, the tokens of this name start at 1 again.

    No other owner can acquire the lease before ``expires_at``; None means never. ``released_at`` is None while the
    lease is held.
    """

    key = models.BigIntegerField(_("key"), primary_key=True)
    name = models.TextField(_("name"))
    owner = models.TextField(_("owner"))
    holder = models.UUIDField(_("holder"), help_text=_("The id of the only handle that may renew the lease."))
    token = models.BigIntegerField(_("token"), help_text=_("Grows with each holder; use it as a fencing token."))
    ttl = _Duration(_("lifetime"), null=True, help_text=_("The lease expires this long after its last renewal."))
    acquired_at = models.DateTimeField(_("acquired at"))
    renewed_at = models.DateTimeField(_("renewed at"))
    expires_at = models.DateTimeField(_("expires at"), null=True)
    released_at = models.DateTimeField(_("released at"), null=True)

    for_dumpdata = _DefaultManager()
    objects = LeaseManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        ordering = ["name"]
        default_permissions = ("view",)
        indexes = [
            # The first for the list of the admin, the second for the few leases that are held.
            models.Index(fields=["-acquired_at"], name="django_pglock_lease_recent"),
            models.Index(fields=["-acquired_at"], name="django_pglock_lease_held", condition=Q(released_at=None)),
        ]
        permissions = [("free_lease", _("Can take a lease away from its holder"))]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} {self.token} {'free' if self.released_at else f'of {self.owner!r}'}>"
