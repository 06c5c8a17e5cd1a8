"""The advisory locks of this database, read from a view over ``pg_locks``, and the leases."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_pglock.locks.querysets import AdvisoryLockManager, LeaseManager
from django_pglock.models.base import OnPostgreSQL, manager_for_dumpdata


class AdvisoryLock(models.Model):
    """One advisory lock that a session holds or waits for. Read-only: a query returns the locks of that moment.

    ``name`` comes from the comment at the beginning of a holder's or a waiter's statement. A lock that another program
    has taken has no name. The package's own locks have no ``key``, and their ``name`` says what they are for; the name
    of a worker's lock contains the name of the worker.
    """

    id = models.TextField(primary_key=True)
    key = models.BigIntegerField(_("key"), null=True, help_text=_("Empty: one of the package's own locks."))
    name = models.TextField(_("name"), null=True)
    mode = models.CharField(_("mode"), max_length=16)
    is_granted = models.BooleanField(_("held"))
    pid = models.IntegerField(_("session"))
    waiters = models.IntegerField(_("waiters"), help_text=_("Sessions that wait for this key."))
    blocked_by = models.JSONField(_("blocked by"), help_text=_("Sessions that this one waits for."))
    since = models.DateTimeField(
        _("since"), null=True, help_text=_("Start of the wait or, for a holder, of its transaction or last statement.")
    )
    application_name = models.TextField(_("application"))
    state = models.TextField(_("state"), null=True)
    username = models.TextField(_("user"), null=True)
    client_address = models.TextField(_("client"), null=True)
    query = models.TextField(_("last statement"), null=True)

    for_dumpdata = manager_for_dumpdata(AdvisoryLockManager, is_dumped=False)
    objects = AdvisoryLockManager()

    class Meta(OnPostgreSQL):
        managed = False
        # dumpdata --all uses the base manager. It must leave out this view, which is not a table.
        base_manager_name = "for_dumpdata"
        db_table = "django_pglock_advisorylock"
        verbose_name = _("advisory lock")
        verbose_name_plural = _("advisory locks")
        ordering = ["key", "-is_granted", "since", "pid"]
        default_permissions = ("view",)
        permissions = [("terminate_advisorylock", _("Can end sessions that hold or wait for advisory locks"))]

    def __str__(self) -> str:
        return str(self.name or f"#{self.key}")

    def __repr__(self) -> str:
        return f"<AdvisoryLock {self} {'held' if self.is_granted else 'awaited'} by {self.pid}>"


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
    ttl = models.DurationField(
        _("lifetime"), null=True, help_text=_("The lease expires this long after its last renewal.")
    )
    acquired_at = models.DateTimeField(_("acquired at"))
    renewed_at = models.DateTimeField(_("renewed at"))
    expires_at = models.DateTimeField(_("expires at"), null=True)
    released_at = models.DateTimeField(_("released at"), null=True)

    for_dumpdata = manager_for_dumpdata(LeaseManager, is_dumped=False)
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
