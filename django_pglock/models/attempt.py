"""The failed and lost attempts of tasks."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.dumping import DumpedManager
from django_pglock.models.requirements import OnPostgreSQL
from django_pglock.models.task import Task


class Attempt(models.Model):
    """An attempt that failed, or was lost with its worker. A successful attempt is recorded only in the task."""

    class Outcome(models.TextChoices):
        """How the attempt ended."""

        FAILED = "FAILED", _("Failed")
        LOST = "LOST", _("Lost with its worker")

    id = models.BigAutoField(_("id"), primary_key=True)
    task = models.ForeignKey(
        Task, on_delete=models.CASCADE, related_name="failures", verbose_name=_("task"), db_index=False
    )
    number = models.IntegerField(_("number"), help_text=_("Number of claims of the task, including this one."))
    worker = models.UUIDField(_("worker"), null=True, help_text=_("Empty: the task never ran."))
    # The row of a worker is deleted when the worker ends.
    worker_name = models.CharField(_("worker"), max_length=128, null=True)
    started_at = models.DateTimeField(_("started at"))
    finished_at = models.DateTimeField(_("finished at"))
    outcome = models.CharField(_("outcome"), max_length=16, choices=Outcome.choices)
    exception_path = models.CharField(_("exception"), max_length=512)
    traceback = models.TextField(_("traceback"))
    log = models.TextField(_("log"), null=True)

    for_dumpdata = DumpedManager()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("attempt")
        verbose_name_plural = _("attempts")
        ordering = ["task", "number"]
        constraints = [
            models.UniqueConstraint(fields=["task", "number"], name="pglock_attempt_number"),
            models.CheckConstraint(name="pglock_attempt_outcome", condition=models.Q(outcome__in=["FAILED", "LOST"])),
        ]

    def __str__(self) -> str:
        return _("attempt %(number)s of task %(task)s") % {"number": self.number, "task": self.task_id}

    def __repr__(self) -> str:
        return f"<Attempt {self.number} of task {self.task_id} {self.outcome.lower()}>"
