"""The work of ``locktasks stack``."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError
from django.utils.translation import gettext as _

from django_pglock.management.tables import printable
from django_pglock.store.running_stack import request_stack, wait_for_stack

#: Seconds for which the command waits for the worker: a few heartbeats of a worker that does not listen.
TIMEOUT = 15.0


def stack_text(rows: Any, task: int) -> str:
    """Ask for the stack of a running task of the database of these tasks, and return it. Raises ``CommandError``."""
    if not request_stack(rows.db, task):
        exists = rows.filter(pk=task).exists()
        raise CommandError((_("Task %d is not running.") if exists else _("There is no task %d.")) % task)
    found = wait_for_stack(rows.db, task, timeout=TIMEOUT)
    if found is None or found.answered_at is None:
        raise CommandError(
            _(
                "The worker has not answered. No answer comes while the function is in C code that lets no other "
                "thread run, while the worker cannot reach the database, and from a worker of an older version."
            )
        )
    if not found.stack:
        raise CommandError(_("The function of task %d does not run: it has not begun, or it has ended.") % task)
    return "\n".join(map(printable, found.stack.splitlines()))
