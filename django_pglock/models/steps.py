"""The models of steps and of events."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import OnPostgreSQL, Row, manager_for_dumpdata
from django_pglock.models.task import Task


class Step(Row):
    """A part of a task that has run once, or for which it waits. Written by ``store/steps.py``."""

    pk = models.CompositePrimaryKey("task_id", "name")
    # Without a constraint in the database, as for attempts: each statement that deletes tasks deletes their steps, too.
    task = models.ForeignKey(Task, on_delete=models.CASCADE, related_name="steps", db_index=False, db_constraint=False)
    name = models.CharField(max_length=200)
    number = models.IntegerField()
    kind = models.CharField(max_length=16)
    event = models.CharField(max_length=200, null=True, db_collation="C")
    result = models.JSONField(null=True)
    #: The path and the message of the exception.
    failure = models.JSONField(null=True)
    attempt = models.IntegerField()
    started_at = models.DateTimeField()
    #: Null: the task sleeps or waits, or slept.
    finished_at = models.DateTimeField(null=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        default_permissions = ()
        indexes = [
            # The tasks that wait for an event, for their list in order.
            models.Index(
                fields=["event", "task"],
                name="pglock_step_event",
                condition=models.Q(finished_at__isnull=True, event__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return f"{self.task_id} {self.name}"


class Event(Row):
    """Something that has happened, for which tasks may wait. Written by ``emit()``."""

    # In this collation the index of the primary key also finds names by their beginning, in their order.
    name = models.CharField(_("name"), max_length=200, primary_key=True, db_collation="C")
    payload: Any = models.JSONField(_("payload"), null=True)
    emitted_at = models.DateTimeField(_("emitted at"))
    expires_at = models.DateTimeField(_("kept until"), db_index=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("event")
        verbose_name_plural = _("events")
        default_permissions = ("add", "view", "delete")

    def __str__(self) -> str:
        return self.name
