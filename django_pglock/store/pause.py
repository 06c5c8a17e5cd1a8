"""Pausing and resuming queues."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db.models.functions import Now

from django_pglock.postgres.connections import transaction_block
from django_pglock.store.statements import rows_of
from django_pglock.store.wake import wake
from django_pglock.tasks.queues import check_queue_name, check_text

#: The column's width.
LONGEST_BY = 255


def paused(queues: Any) -> Any:
    """Return the queues from which no worker claims tasks."""
    return queues.filter(paused_at__isnull=False)


def paused_queues(using: str) -> dict[str, datetime]:
    """Return the queues that are paused, and since when."""
    return {row.name: row.paused_at for row in paused(rows_of("Queue", using))}


def pause(using: str, name: str, *, by: str = "", reason: str = "") -> bool:
    """Stop workers from claiming tasks of the queue ``name``. Return whether the queue was not paused before.

    Tasks that are already claimed run to their end. A queue that does not have tasks yet can be paused, too. Raises
    ``ValueError`` as ``check_pausable`` does, and for a reason that PostgreSQL cannot store.
    """
    check_pausable(name)
    check_text(reason, "The reason")
    queues = rows_of("Queue", using)
    with transaction_block(using):
        queues.get_or_create(name=name)
    values = {
        "paused_at": Now(),
        "paused_by": by[:LONGEST_BY],
        "reason": reason,
    }
    return bool(queues.filter(name=name, paused_at__isnull=True).update(**values))


def resume(using: str, name: str) -> bool:
    """Let workers claim from the queue again, at once. Return whether it was paused.

    Raises ``ValueError`` as ``check_pausable`` does.
    """
    check_pausable(name)
    queues = rows_of("Queue", using)
    resumed = bool(paused(queues.filter(name=name)).update(paused_at=None, paused_by="", reason=""))
    if resumed:
        wake(using, [name])
    return resumed


def check_pausable(name: str) -> None:
    """Raise ``ValueError`` for an invalid name, and for a name that ends in ``*``."""
    check_queue_name(name)
    if name.endswith("*"):
        raise ValueError(
            f"{name!r} is no queue. Only runlockworker reads PREFIX* as all names with a prefix. "
            "Pause or resume each queue by its name."
        )
