"""The leases: who holds which, until when, and the token of the last holder."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_pglock.locks.leases.queryset import LeaseManager
from django_pglock.models.dumping import LeftOut
from django_pglock.models.requirements import OnPostgreSQL


class _DefaultManager(LeftOut, LeaseManager):
    pass


class Lease(models.Model):
    """One lease. Its row stays when it is given back, because the next token has to be larger.

    ``expires_at`` says until when others are kept out; None is for ever. ``released_at`` is None while it is held.
    """

    key = models.BigIntegerField(_("key"), primary_key=True)
    name = models.TextField(_("name"))
    owner = models.TextField(_("owner"))
    holder = models.UUIDField(_("holder"), help_text=_("The number of the one handle that may renew it."))
    token = models.BigIntegerField(_("token"), help_text=_("Grows with each holder; use it as a fence."))
    ttl = models.DurationField(_("lifetime"), null=True, help_text=_("Without a sign of life it ends after this."))
    acquired_at = models.DateTimeField(_("acquired at"))
    renewed_at = models.DateTimeField(_("renewed at"))
    expires_at = models.DateTimeField(_("ends at"), null=True)
    released_at = models.DateTimeField(_("given back at"), null=True)

    for_dumpdata = _DefaultManager()
    objects = LeaseManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("lease")
        verbose_name_plural = _("leases")
        ordering = ["name"]
        default_permissions = ("view", "delete")
        indexes = [
            # The admin's list, and the few that are held among the many that were.
            models.Index(fields=["-acquired_at"], name="django_pglock_lease_recent"),
            models.Index(fields=["-acquired_at"], name="django_pglock_lease_held", condition=Q(released_at=None)),
        ]
        permissions = [("free_lease", _("Can take a lease away from its holder"))]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Lease {self.name!r} {self.token} {'free' if self.released_at else f'of {self.owner!r}'}>"
