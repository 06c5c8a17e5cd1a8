"""The numbers: attempts per minute and per hour, and how many tasks each queue has."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import CountsField, DumpedManager, OnPostgreSQL
from django_pglock.store.managers import NumberManager


class Number(models.Model):
    """What was counted of one kind in a period of 60 or 3600 ``seconds``, or of all time if ``seconds`` is 0.

    Of one function in one queue; of all functions in the queue if ``task_path`` is empty; of all queues if ``queue`` is
    empty, too. The kinds of attempts are small letters: an outcome such as ``failed``, ``waited`` and ``ran``, whose
    ``total`` is in seconds and whose ``buckets`` are a histogram (``store/counts.py`` has the bounds). ``failed``
    attempts were the last of their tasks, ``retried`` ones failed as well, ``lost`` ones were lost with their worker or
    connection. A status in capitals is the number of tasks that the queue had when it was last counted in that minute;
    the ``total`` of READY is the age of the oldest.
    """

    # The names are for programs: no page shows these rows as they are.
    id = models.BigAutoField(primary_key=True)
    seconds = models.IntegerField()
    started_at = models.DateTimeField()
    kind = models.CharField(max_length=16)
    queue = models.CharField(max_length=128, blank=True)
    task_path = models.CharField(max_length=512, blank=True)
    count = models.BigIntegerField()
    total = models.FloatField()
    buckets = CountsField()

    for_dumpdata = DumpedManager()
    objects = NumberManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("number")
        verbose_name_plural = _("numbers")
        default_permissions = ("view",)
        constraints = [
            models.UniqueConstraint(
                fields=["seconds", "task_path", "queue", "started_at", "kind"], name="pglock_number_of"
            )
        ]
        indexes = [models.Index(fields=["seconds", "started_at"], name="pglock_number_since")]

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.started_at:%Y-%m-%d %H:%M}", self.kind, self.queue, self.task_path)))

    def __repr__(self) -> str:
        return f"<Number {self} {self.seconds} s>"
