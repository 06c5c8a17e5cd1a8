"""The schedules of task functions, and when each is due."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import Dumped, OnPostgreSQL
from django_pglock.store.managers import ScheduleManager
from django_pglock.tasks.states import READABLE


class _DefaultManager(Dumped, ScheduleManager):
    pass


class Schedule(models.Model):
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

    for_dumpdata = _DefaultManager()
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

    def __repr__(self) -> str:
        return f"<Schedule {self.name!r} {self.expression!r}>"
