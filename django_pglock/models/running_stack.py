"""Where running tasks are in their code, on request."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import NotDumped
from django_pglock.models.requirements import OnPostgreSQL


class _DefaultManager(NotDumped, models.Manager[Any]):
    pass


class RunningStack(models.Model):
    """One request for the stack of a running task, and the answer of its worker. Deleted by a request minutes later.

    ``task`` is not a foreign key, so that tasks can be pruned without a query of this table.
    """

    task = models.BigIntegerField(primary_key=True)
    #: The fencing token of the attempt.
    attempt = models.IntegerField()
    worker = models.UUIDField()
    asked_at = models.DateTimeField()
    answered_at = models.DateTimeField(null=True)
    stack = models.TextField()

    for_dumpdata = _DefaultManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("stack of a running task")
        verbose_name_plural = _("stacks of running tasks")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.task)

    def __repr__(self) -> str:
        return f"<RunningStack of task {self.task} attempt {self.attempt}>"
