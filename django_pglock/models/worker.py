"""The worker processes that are alive, or were until recently, and the schedules that they keep."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, router
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import OnPostgreSQL, Row, manager_for_dumpdata
from django_pglock.models.managers import ScheduleManager, WorkerManager
from django_pglock.store import schedules
from django_pglock.store.wake import wake_parents
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


#: What people write; workers write the other columns.
OF_PEOPLE = ("task_path", "args", "kwargs", "expression", "timezone", "note", "is_enabled")


class Schedule(Row):
    """One schedule: a task function that runs by the clock.

    A schedule of the code (``cron=``, ``every=``) has the name of its function. The first worker that knows the
    function creates the row. People create the others, in the admin or by ``Schedule.objects.create()``.
    """

    name = models.CharField(_("name"), max_length=512, primary_key=True)
    task_path = models.CharField(_("task function"), max_length=512)
    args = models.JSONField(_("arguments"), default=list, db_default=models.Value([], models.JSONField()), blank=True)
    kwargs = models.JSONField(
        _("keyword arguments"), default=dict, db_default=models.Value({}, models.JSONField()), blank=True
    )
    expression = models.CharField(
        _("when"),
        max_length=255,
        help_text=_("An interval, such as every 5 minutes, or the five fields of cron, such as 30 7 * * 1-5."),
    )
    timezone = models.CharField(
        _("time zone"), max_length=64, blank=True, default="", db_default="", help_text=_("Of cron. Empty: TIME_ZONE.")
    )
    note = models.TextField(_("note"), blank=True, default="", db_default="")
    versions = models.JSONField(
        _("versions"),
        db_default=models.Value([], models.JSONField()),
        editable=False,
        help_text=_("What code has said, the newest first. Code with an earlier version does not change the row."),
    )
    is_enabled = models.BooleanField(_("enabled"), default=True, db_default=True)
    next_at = models.DateTimeField(
        _("next tick"), db_default=Now(), editable=False, help_text=_("The tick that is enqueued next.")
    )
    last_at = models.DateTimeField(
        _("last tick"), null=True, editable=False, help_text=_("The tick that was enqueued last.")
    )
    last_task = models.BigIntegerField(_("last task"), null=True, editable=False)

    #: The arguments of tasks are hidden by ``meta``, too.
    meta = None

    for_dumpdata = manager_for_dumpdata(ScheduleManager)
    objects = ScheduleManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ["next_at"]
        constraints = [
            # One date that cannot be read would stop all schedules, and each page that shows them.
            models.CheckConstraint(
                name="pglock_schedule_dates", condition=models.Q(next_at__range=READABLE, last_at__range=READABLE)
            ),
        ]

    def __str__(self) -> str:
        return str(self.name)

    @property
    def is_of_code(self) -> bool:
        """Whether the schedule stands in the code, so that people cannot edit it."""
        return bool(self.name == self.task_path)

    def clean(self) -> None:
        """Raise ``ValidationError`` for what no worker could enqueue: an unknown function, wrong arguments or times."""
        self._check(router.db_for_write(type(self), instance=self))

    def _check(self, using: str) -> None:
        if problems := schedules.problems_of(self, using):
            raise ValidationError(problems)

    def save(self, **options: Any) -> None:
        """Check the row, and write what people decide. Workers write the rest, so an edit repeats and skips no tick.

        Raises ``ValidationError`` as ``clean()`` does. To an existing name it raises ``IntegrityError``.
        """
        using = options["using"] = options.get("using") or router.db_for_write(type(self), instance=self)
        self._check(using)
        if options.get("update_fields") is None:
            options |= {"force_insert": True} if self._state.adding else {"update_fields": OF_PEOPLE}
        if self.is_enabled and "is_enabled" in options.get("update_fields", ()):
            # Ticks that have passed are not run.
            type(self).objects.using(using).filter(pk=self.pk).enable()
        super().save(**options)
        wake_parents(using)
