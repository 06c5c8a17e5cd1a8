"""Pausing and resuming queues."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models.functions import Now

from django_pglock.store import wake as wakeup
from django_pglock.tasks.compat import task_backends

#: The columns' widths.
LONGEST_QUEUE = 128
LONGEST_BY = 255


def check_queue_name(name: str) -> None:
    """Raise ``ValueError`` for what cannot be the name of a queue."""
    if not 1 <= len(name) <= LONGEST_QUEUE:
        raise ValueError(f"A queue's name has 1 to {LONGEST_QUEUE} characters, not {len(name):,}: {name[:40]!r}.")
    _check_text(name, "A queue's name")


def _check_text(text: str, what: str) -> None:
    if "\x00" in text or any("\ud800" <= each <= "\udfff" for each in text):
        raise ValueError(
            f"{what} cannot have a NUL or a lone surrogate in it, which PostgreSQL does not store: {text[:40]!r}."
        )


class QueueQuerySet(models.QuerySet[Any]):
    """The verbs of queues."""

    def paused(self) -> QueueQuerySet:
        """Queues from which no worker claims anything."""
        return self.filter(paused_at__isnull=False)

    def pause(self, name: str, *, by: str = "", reason: str = "") -> bool:
        """Let no worker claim from the queue ``name`` until it is resumed; say whether that is news.

        What a worker has claimed already runs to its end. Holds for queues that nobody has used yet, too.
        Raises ``ValueError`` as ``check_name`` does, and for a reason that is no text.
        """
        self.check_name(name)
        _check_text(reason, "The reason")
        self.get_or_create(name=name)
        values = {
            "paused_at": Now(),
            "paused_by": by if len(by) <= LONGEST_BY else f"{by[: LONGEST_BY - 1]}…",
            "reason": reason,
        }
        return bool(self.filter(name=name, paused_at__isnull=True).update(**values))

    def resume(self, name: str) -> bool:
        """Let workers claim from the queue again, at once; say whether it was paused.

        Raises ``ValueError`` as ``check_name`` does.
        """
        self.check_name(name)
        resumed = bool(self.filter(name=name).paused().update(paused_at=None, paused_by="", reason=""))
        if resumed:
            self._tasks().wake([name], wakeup.READY_CHANNEL)
        return resumed

    def check_name(self, name: str) -> None:
        """Raise ``ValueError`` for a name that no queue can have, or that ends in ``*`` and no queue has."""
        check_queue_name(name)
        if name.endswith("*") and not self._has_queue(name):
            raise ValueError(
                f"There is no queue {name!r}, and a * stands for how names begin only in runlockworker. "
                "Pause or resume each queue by its name."
            )

    def _has_queue(self, name: str) -> bool:
        is_named = any(name in backend.queues for backend in task_backends.all())
        # Not every task is in an index by its queue, but few people call a queue so.
        return is_named or self.filter(name=name).exists() or self._tasks().filter(queue=name).exists()

    def _tasks(self) -> Any:
        return self.model._meta.apps.get_model("django_pglock", "Task").objects.using(self.db)


class QueueManager(models.Manager.from_queryset(QueueQuerySet)):  # type: ignore[misc]
    """The manager of ``Queue``."""
