"""The table ``task_state``: each row is a lock, and the task that the lock is for."""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now

from django_pglock import ClaimQuerySet


class Status(models.TextChoices):
    """What may become of a row. It is held while it is IN_PROGRESS, and only then."""

    NEW = "new"
    IN_PROGRESS = "in_progress"
    FAILED = "failed"
    EXPIRED = "expired"
    DONE = "done"


#: The statuses in which a row may be taken.
FREE = [Status.NEW, Status.FAILED, Status.EXPIRED]
#: The status that follows when a row's time in its status is over. In the other statuses a row stays.
WHEN_OVER = {Status.IN_PROGRESS: Status.EXPIRED, Status.DONE: Status.NEW}


class TaskStates(ClaimQuerySet["TaskState"]):
    """Rows, and the verbs by which clients share them. Each statement names the statuses from which it moves rows."""

    def acquire(self, queue: str, name: str, owner: str, timeout: timedelta | None = None) -> TaskState | None:
        """Take one row, as a mutex. Return None if an owner has it, or if it has no retries left."""
        taken = self.filter(queue=queue, name=name).capture(owner, 1, timeout)
        return taken[0] if taken else None

    def capture(self, owner: str, limit: int, timeout: timedelta | None = None) -> list[TaskState]:
        """Take up to ``limit`` free rows for ``owner``, the oldest first, and spend a retry of each.

        They are held until ``release()``, or until the timeout is over. Without a timeout a dead owner holds them.
        """
        self.move_stale()
        return (
            self.filter(status__in=FREE)
            .exclude(retries_left=0)
            .order_by("id")
            .claim_update(
                limit,
                status=Status.IN_PROGRESS,
                owner=owner,
                token=F("token") + 1,
                retries_left=F("retries_left") - 1,
                expires_at=after(timeout),
            )
        )

    def move_stale(self) -> None:
        """Move the rows on whose time in their status is over. Any client may do so at any time, so no timer has to."""
        for status, following in WHEN_OVER.items():
            stale = self.filter(status=status, expires_at__lte=Now())
            stale.claim_update(None, status=following, owner=None, expires_at=None)


class TaskState(models.Model):
    """A lock with an owner, a state, a time limit and retries. Its name is unique in its queue."""

    queue = models.TextField(db_default="default")
    name = models.TextField()
    status = models.TextField(choices=Status.choices, db_default=Status.NEW)
    owner = models.TextField(null=True)
    token = models.BigIntegerField(db_default=0, help_text="Counts how often the row was taken.")
    retries_left = models.PositiveIntegerField(null=True, help_text="NULL: no limit.")
    expires_at = models.DateTimeField(null=True, help_text="When the time in the status is over. NULL: never.")

    objects = TaskStates.as_manager()

    class Meta:
        db_table = "task_state"
        constraints = [
            models.UniqueConstraint(fields=["queue", "name"], name="task_state_unique_in_queue"),
            models.CheckConstraint(
                condition=Q(status=Status.IN_PROGRESS, owner__isnull=False)
                | (~Q(status=Status.IN_PROGRESS) & Q(owner__isnull=True)),
                name="task_state_held_by_an_owner",
            ),
        ]
        indexes = [
            models.Index(fields=["queue", "id"], name="task_state_free", condition=Q(status__in=FREE)),
            models.Index(fields=["expires_at"], name="task_state_timed", condition=Q(expires_at__isnull=False)),
        ]

    def __str__(self) -> str:
        return f"{self.queue}/{self.name}"

    def release(self, status: Status = Status.NEW, timeout: timedelta | None = None) -> bool:
        """Give the row back in a status, which may have a timeout, too. Return False if its own time is over."""
        in_time = Q(expires_at=None) | Q(expires_at__gt=Now())
        held = TaskState.objects.filter(in_time, pk=self.pk, owner=self.owner, token=self.token)
        return held.update(status=status, owner=None, expires_at=after(timeout)) == 1


def after(timeout: timedelta | None) -> models.Expression | None:
    """Return the time after a timeout, by the server's clock; None: never."""
    return None if timeout is None else Now() + timeout
