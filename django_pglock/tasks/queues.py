"""Pausing and resuming queues."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.functions import Now

from django_pglock.tasks import wakeup


class QueueQuerySet(models.QuerySet[Any]):
    """The verbs of queues."""

    def paused(self) -> QueueQuerySet:
        """Queues from which no worker claims anything."""
        return self.filter(paused_at__isnull=False)

    def pause(self, name: str, *, by: str = "", reason: str = "") -> bool:
        """Let no worker claim from the queue ``name`` until it is resumed; say whether that is news.

        What a worker has claimed already runs to its end. Holds for queues that nobody has used yet, too.
        """
        self.get_or_create(name=name)
        values = {"paused_at": Now(), "paused_by": by[:255], "reason": reason}
        return bool(self.filter(name=name, paused_at__isnull=True).update(**values))

    def resume(self, name: str) -> bool:
        """Let workers claim from the queue again, at once; say whether it was paused."""
        resumed = bool(self.filter(name=name).paused().update(paused_at=None, paused_by="", reason=""))
        if resumed:
            tasks = self.model._meta.apps.get_model("django_pglock", "Task").objects.using(self.db)
            tasks.wake([name], wakeup.READY_CHANNEL)
        return resumed


class QueueManager(models.Manager.from_queryset(QueueQuerySet)):  # type: ignore[misc]
    """The manager of ``Queue``."""
