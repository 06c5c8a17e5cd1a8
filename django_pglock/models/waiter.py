"""Tasks and processes that wait for a task to finish."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import DumpedManager
from django_pglock.models.requirements import OnPostgreSQL
from django_pglock.models.task import Task


class Waiter(models.Model):
    """One wait for the end of the task ``awaited``, by ``task`` or, if that is None, by a process that listens.

    The row is deleted when the wait is over. ``awaited`` is not a foreign key, so that finished tasks can be pruned
    without a query of this table.
    """

    id = models.BigAutoField(_("id"), primary_key=True)
    awaited = models.BigIntegerField(_("awaited"))
    task = models.ForeignKey(
        Task, on_delete=models.CASCADE, related_name="awaiting", verbose_name=_("task"), null=True, db_index=True
    )

    for_dumpdata = DumpedManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("waiter")
        verbose_name_plural = _("waiters")
        default_permissions = ()
        # The sum prevents a search by the task alone from using this index. With wrong statistics, such a search would
        # read the whole index.
        indexes = [models.Index("awaited", models.F("task") + 0, name="pglock_waiter_awaited")]

    def __str__(self) -> str:
        return f"{self.task_id or '?'} → {self.awaited}"

    def __repr__(self) -> str:
        return f"<Waiter of task {self.awaited}>"
