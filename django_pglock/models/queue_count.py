"""How many tasks are in each queue, as one worker has counted for all."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import NotDumped, OnPostgreSQL


class _DefaultManager(NotDumped, models.Manager[Any]):
    pass


class QueueCount(models.Model):
    """The tasks of one queue by status, as a worker has counted them lately.

    The row without a name says when a worker counts again, and has the groups of failed tasks. ``oldest_ready`` is in
    seconds.
    """

    queue = models.CharField(primary_key=True, max_length=128)
    counted_at = models.DateTimeField()
    count_again_at = models.DateTimeField(null=True)
    ready = models.BigIntegerField()
    blocked = models.BigIntegerField()
    scheduled = models.BigIntegerField()
    running = models.BigIntegerField()
    failed = models.BigIntegerField()
    oldest_ready = models.FloatField(null=True)
    is_paused = models.BooleanField()
    failures = models.JSONField(null=True)

    # What another database would take for its own counts.
    for_dumpdata = _DefaultManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        default_permissions = ()

    def __str__(self) -> str:
        return self.queue

    def __repr__(self) -> str:
        return f"<QueueCount {self.queue!r}>"
