"""The models of steps and of events."""

from __future__ import annotations

from typing import Any

from django.db import models

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
    event = models.CharField(max_length=200, null=True)
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
            # The tasks that wait for an event.
            models.Index(
                fields=["event"],
                name="pglock_step_event",
                condition=models.Q(finished_at__isnull=True, event__isnull=False),
            )
        ]

    def __str__(self) -> str:
        return f"{self.task_id} {self.name}"


class Event(Row):
    """Something that has happened, for which tasks may wait. Written by ``emit()``."""

    name = models.CharField(max_length=200, primary_key=True)
    payload: Any = models.JSONField(null=True)
    emitted_at = models.DateTimeField()
    expires_at = models.DateTimeField(db_index=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
