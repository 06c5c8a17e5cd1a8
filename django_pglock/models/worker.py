"""The worker processes that are alive, or were until recently, and the schedules that they keep."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import OnPostgreSQL, Row, manager_for_dumpdata
from django_pglock.models.managers import ScheduleManager, WorkerManager
from django_pglock.tasks.states import READABLE


class Worker(Row):
    """One worker process. Each start has a new random id, so a restarted worker is not taken for the one before."""

    id = models.UUIDField(_("id"), primary_key=True, editable=False)
    parent = models.UUIDField(
        _("parent"),
        editable=False,
        help_text=_("The process that has started the worker, and beats and listens for it."),
    )
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
        help_text=_("Number of the advisory lock that the session of the parent holds. Empty behind a pooler."),
    )
    is_sleeping = models.BooleanField(
        _("sleeping"), db_default=False, help_text=_("The worker is idle and wants a NOTIFY for new tasks.")
    )
    is_stopping = models.BooleanField(_("stopping"), db_default=False)
    started_at = models.DateTimeField(_("started at"), db_default=Now())
    heartbeat_at = models.DateTimeField(_("heartbeat at"), db_default=Now())

    for_dumpdata = manager_for_dumpdata(WorkerManager, is_dumped=False)
    objects = WorkerManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        ordering = ["started_at"]

    def __str__(self) -> str:
        return str(self.name)


class Schedule(Row):
    """One task function that runs by the clock. The first worker that knows the function creates the row.

    A schedule of the code has the name of its function.
    """

    name = models.CharField(_("name"), max_length=512, primary_key=True)
    task_path = models.CharField(_("task function"), max_length=512)
    expression = models.CharField(_("when"), max_length=255, help_text=_("As written in the code."))
    timezone = models.CharField(_("time zone"), max_length=64)
    versions = models.JSONField(
        _("versions"),
        db_default=models.Value([], models.JSONField()),
        editable=False,
        help_text=_("What code has said, the newest first. Code with an earlier version does not change the row."),
    )
    is_enabled = models.BooleanField(_("enabled"), db_default=True)
    next_at = models.DateTimeField(_("next tick"), help_text=_("The tick that is enqueued next."))
    last_at = models.DateTimeField(_("last tick"), null=True, help_text=_("The tick that was enqueued last."))
    last_task = models.BigIntegerField(_("last task"), null=True)

    for_dumpdata = manager_for_dumpdata(ScheduleManager)
    objects = ScheduleManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ["next_at"]
        default_permissions = ("view", "change", "delete")
        constraints = [
            # One date that cannot be read would stop all schedules, and each page that shows them.
            models.CheckConstraint(
                name="pglock_schedule_dates", condition=models.Q(next_at__range=READABLE, last_at__range=READABLE)
            ),
        ]

    def __str__(self) -> str:
        return str(self.name)
