"""The queues that have been paused."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import Dumped
from django_pglock.models.requirements import OnPostgreSQL
from django_pglock.store.managers import QueueManager


class _DefaultManager(Dumped, QueueManager):
    pass


class Queue(models.Model):
    """A queue that has been paused at least once. Other queues need no row; a queue without a row is not paused."""

    name = models.CharField(_("name"), max_length=128, primary_key=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, editable=False)
    paused_by = models.CharField(_("paused by"), max_length=255, blank=True, default="")
    reason = models.TextField(_("reason"), blank=True, default="")

    for_dumpdata = _DefaultManager()
    objects = QueueManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        ordering = ["name"]
        default_permissions = ("view", "delete")
        permissions = [("pause_queue", _("Can pause and resume queues"))]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Queue {self.name!r}{' paused' if self.paused_at else ''}>"
