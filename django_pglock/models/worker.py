"""The worker processes that are alive, or were until recently."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import NotDumped, OnPostgreSQL
from django_pglock.store.managers import WorkerManager


class _DefaultManager(NotDumped, WorkerManager):
    pass


class Worker(models.Model):
    """One worker process. Each start has a new random id, so a restarted worker is not taken for the one before."""

    id = models.UUIDField(_("id"), primary_key=True, editable=False)
    name = models.CharField(_("name"), max_length=128)
    hostname = models.CharField(_("host"), max_length=255)
    pid = models.IntegerField(_("process id"))
    queues = models.JSONField(_("queues"), help_text=_("Empty: all queues."))
    threads = models.SmallIntegerField(_("threads"))
    task_paths = models.JSONField(
        _("task functions"),
        db_default=models.Value([], models.JSONField()),
        help_text=_("The task functions that this worker can run, and their schedules."),
    )
    lock_key = models.IntegerField(
        _("lock key"),
        null=True,
        help_text=_(
            "Number of the advisory lock that the worker's session holds while the worker lives. Empty behind a pooler."
        ),
    )
    is_sleeping = models.BooleanField(
        _("sleeping"), db_default=False, help_text=_("The worker is idle and wants a NOTIFY for new tasks.")
    )
    is_stopping = models.BooleanField(_("stopping"), db_default=False)
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    heartbeat_at = models.DateTimeField(_("heartbeat at"), db_default=Now())
    beating_since = models.DateTimeField(
        _("on time since"), db_default=Now(), help_text=_("No heartbeat was late and no session was lost since then.")
    )

    for_dumpdata = _DefaultManager()
    objects = WorkerManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        ordering = ["started_at"]

    def __str__(self) -> str:
        return str(self.name)

    def __repr__(self) -> str:
        return f"<Worker {self.name!r}>"
