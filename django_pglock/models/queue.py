"""The queues that have been paused, the rate limits, and the numbers: attempts and tasks by queue and function."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from django_pglock.models.base import CountsField, OnPostgreSQL, Row, manager_for_dumpdata
from django_pglock.models.managers import NumberManager, QueueManager


class Queue(Row):
    """A queue that has been paused at least once. Other queues need no row; a queue without a row is not paused."""

    name = models.CharField(_("name"), max_length=128, primary_key=True)
    paused_at = models.DateTimeField(_("paused at"), null=True, editable=False)
    paused_by = models.CharField(_("paused by"), max_length=255, blank=True, default="")
    reason = models.TextField(_("reason"), blank=True, default="")

    for_dumpdata = manager_for_dumpdata(QueueManager)
    objects = QueueManager()

    class Meta(OnPostgreSQL):
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        ordering = ["name"]
        default_permissions = ("view", "delete")
        permissions = [("pause_queue", _("Can pause and resume queues"))]

    def __str__(self) -> str:
        return self.name


class RateLimit(Row):
    """The token bucket of one key. The generic cell rate algorithm stores one date (ITU-T I.371, "virtual scheduling").

    ``arrives_at`` is the theoretical arrival time of the next token; ``opens_at`` is set while tasks wait for a token.
    """

    key = models.CharField(_("key"), max_length=512, primary_key=True)
    arrives_at = models.DateTimeField(_("next token at"))
    opens_at = models.DateTimeField(_("tasks wait until"), null=True)

    for_dumpdata = manager_for_dumpdata()
    objects = models.Manager()

    class Meta(OnPostgreSQL):
        verbose_name = _("rate limit")
        verbose_name_plural = _("rate limits")
        default_permissions = ("view",)
        indexes = [
            models.Index(fields=["opens_at"], name="pglock_rate_opens", condition=models.Q(opens_at__isnull=False))
        ]

    def __str__(self) -> str:
        return self.key


class Number(Row):
    """What was counted of one kind in a period of 60 or 3600 ``seconds``, or of all time if ``seconds`` is 0.

    Of one function in one queue; of all functions in the queue if ``task_path`` is empty; of all queues if ``queue`` is
    empty, too. The kinds of attempts are small letters: an outcome such as ``failed``, ``waited`` and ``ran``, whose
    ``total`` is in seconds and whose ``buckets`` are a histogram (``store/numbers.py`` has the bounds). ``failed``
    attempts were the last of their tasks, ``retried`` ones failed as well, ``lost`` ones were lost with their worker or
    connection. ``steps`` were recorded, and ``timeouts`` ended waits for events. A status in capitals, or a kind of
    suspended tasks, is the number of tasks that the queue had when it was last counted in that minute; the ``total`` of
    READY is the age of the oldest.
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

    for_dumpdata = manager_for_dumpdata()
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
