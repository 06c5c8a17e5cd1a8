"""The groups of failures that have been muted."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import DumpedManager
from django_pglock.models.requirements import OnPostgreSQL


class FailureGroup(models.Model):
    """A group of failures that has been muted at least once. Other groups need no row; without a row none is muted.

    The failed tasks themselves have the ``fingerprint``, so nothing is written here when a task fails.
    """

    fingerprint = models.BigIntegerField(_("fingerprint"), primary_key=True)
    muted_at = models.DateTimeField(_("muted at"), null=True)
    muted_by = models.CharField(_("muted by"), max_length=255, blank=True, default="")

    for_dumpdata = DumpedManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("failure")
        verbose_name_plural = _("failures")
        default_permissions = ()
        permissions = [("mute_failuregroup", _("Can mute failures"))]

    def __str__(self) -> str:
        return str(self.fingerprint)

    def __repr__(self) -> str:
        return f"<FailureGroup {self.fingerprint}{' muted' if self.muted_at else ''}>"
