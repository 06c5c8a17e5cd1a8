"""The queues that have been paused."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import Dumped, DumpedManager, OnPostgreSQL
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


class RateLimit(models.Model):
    """The token bucket of one key. The generic cell rate algorithm stores one date (ITU-T I.371, "virtual scheduling").

    ``arrives_at`` is the theoretical arrival time of the next token; ``opens_at`` is set while tasks wait for a token.
    """

    key = models.CharField(_("key"), max_length=512, primary_key=True)
    arrives_at = models.DateTimeField(_("next token at"))
    opens_at = models.DateTimeField(_("tasks wait until"), null=True)

    for_dumpdata = DumpedManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")
        default_permissions = ("view",)
        indexes = [
            models.Index(fields=["opens_at"], name="pglock_rate_opens", condition=models.Q(opens_at__isnull=False))
        ]

    def __str__(self) -> str:
        return self.key

    def __repr__(self) -> str:
        return f"<RateLimit {self.key!r}>"
