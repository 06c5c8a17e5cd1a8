"""The history of attempts: their numbers per minute and per hour."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import CountsField, DumpedManager, OnPostgreSQL
from django_pglock.store.managers import HistoryManager


class TaskHistory(models.Model):
    """How many attempts ended in a period of 60 or 3600 ``seconds`` with which outcome, and how long they took.

    Of one function in one queue; of all functions in the queue if ``task_path`` is empty; of all queues if ``queue`` is
    empty, too. ``failed`` attempts were the last of their tasks, ``retried`` ones failed as well, ``lost`` ones were
    lost with their worker or connection. ``wait`` and ``run`` are numbers of attempts by the bucket of the time from
    ready to claimed and of the time for which the function ran; ``store/history.py`` has the bounds.
    """

    # The names are for programs: no page shows these rows as they are.
    id = models.BigAutoField(primary_key=True)
    seconds = models.IntegerField()
    started_at = models.DateTimeField()
    queue = models.CharField(max_length=128, blank=True)
    task_path = models.CharField(max_length=512, blank=True)
    succeeded = models.BigIntegerField()
    failed = models.BigIntegerField()
    retried = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    snoozed = models.BigIntegerField()
    lost = models.BigIntegerField()
    wait_seconds = models.FloatField()
    run_seconds = models.FloatField()
    wait = CountsField()
    run = CountsField()

    for_dumpdata = DumpedManager()
    objects = HistoryManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("history")
        verbose_name_plural = _("history")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(fields=["seconds", "task_path", "queue", "started_at"], name="pglock_history_of")
        ]
        indexes = [models.Index(fields=["seconds", "started_at"], name="pglock_history_since")]

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.started_at:%Y-%m-%d %H:%M}", self.queue, self.task_path)))

    def __repr__(self) -> str:
        return f"<TaskHistory {self} {self.seconds} s>"
