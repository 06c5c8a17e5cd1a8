"""The model of a task that has succeeded and was moved to the archive."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import NotDumped
from django_pglock.models.requirements import OnPostgreSQL
from django_pglock.tasks.states import TaskStatus


# Left out of dumps, because the other database may have no partition for the day of a row.
class _DefaultManager(NotDumped, models.Manager[Any]):
    pass


class ArchivedTask(models.Model):
    """A task in the archive: a table with one partition for each day in which tasks have ended, by UTC.

    Only tasks that have succeeded are moved here, if ``locktasks archive on`` was run. ``id`` is that of the task. The
    primary key of the table is ``(id, finished_at)``, because each key of a partitioned table has to contain the column
    by which it is partitioned; the migration creates it.
    """

    id = models.BigIntegerField(_("id"), primary_key=True)
    status = models.CharField(_("status"), max_length=16, choices=TaskStatus.choices)
    queue = models.CharField(_("queue"), max_length=128)
    priority = models.SmallIntegerField(_("priority"))
    task_path = models.CharField(_("task function"), max_length=512)
    args = models.JSONField(_("arguments"))
    kwargs = models.JSONField(_("keyword arguments"))
    backend = models.CharField(_("backend"), max_length=64)
    retries = models.SmallIntegerField(_("retries"))
    max_retries = models.SmallIntegerField(_("maximum retries"))
    attempts = models.IntegerField(_("attempts"))
    uncounted = models.IntegerField(_("uncounted claims"))
    rescues = models.SmallIntegerField(_("rescues"))
    worker = models.UUIDField(_("worker"), null=True)
    lock_key = models.CharField(_("lock key"), max_length=512, null=True)
    concurrency = models.SmallIntegerField(_("concurrency"), null=True)
    group_key = models.CharField(_("group key"), max_length=512, null=True)
    fair_key = models.CharField(_("fair key"), max_length=512, null=True)
    unique_key = models.CharField(_("unique key"), max_length=512, null=True)
    cancel_requested_at = models.DateTimeField(_("cancel requested at"), null=True)
    run_after = models.DateTimeField(_("run after"), null=True)
    enqueued_at = models.DateTimeField(_("enqueued at"))
    started_at = models.DateTimeField(_("started at"), null=True)
    last_attempted_at = models.DateTimeField(_("last attempted at"), null=True)
    finished_at = models.DateTimeField(_("finished at"))
    progress = models.JSONField(_("progress"), null=True)
    result = models.JSONField(_("result"), null=True)
    log = models.TextField(_("log"), null=True)
    meta = models.JSONField(_("meta"))
    failed_attempts = models.JSONField(
        _("failed and lost attempts"), null=True, help_text=_("The attempts before the one that succeeded, in order.")
    )

    for_dumpdata = _DefaultManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("archived task")
        verbose_name_plural = _("archived tasks")
        ordering = ["-id"]
        # A user who may view tasks may view these: they are the same data.
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.task_path} #{self.pk}"

    def __repr__(self) -> str:
        return f"<ArchivedTask {self.pk} {self.queue!r} finished {self.finished_at:%Y-%m-%d}>"

    @property
    def attempts_made(self) -> int:
        """How often the function was started, without snoozes; ``attempts`` is the number of claims."""
        return int(self.attempts - self.uncounted)

    @property
    def name(self) -> str:
        """The name of the function without its module: short enough for a list."""
        return str(self.task_path).rpartition(".")[2]
