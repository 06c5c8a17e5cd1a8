"""Bulk changes as tasks: more tasks than a request can change in its time, with progress, and with an end on request.

A person has seen how many tasks would change, and has confirmed it. So the ids are written down at that moment, and the
task changes these and no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import Q

from django_pglock.errors import ConfigurationError
from django_pglock.store.statements import rows_of
from django_pglock.store.windows import WINDOW, is_among
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.definition import task
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.verbs import TASK_VERBS, Verb

#: The ids that one task takes: a row of about a megabyte.
MOST_IDS = 100_000
#: The highest priority, because the queue may be full of the tasks that are to be cancelled.
PRIORITY = 100


def backend_of(using: str) -> str:
    """Return the alias of a backend of this package whose tasks are in the database ``using``.

    Raises ``ConfigurationError`` if there is none.
    """
    for backend in our_backends():
        if backend.database == using:
            return str(backend.alias)
    raise ConfigurationError(f"No backend in TASKS stores its tasks in the database {using!r}, so no task can be run.")


@task(takes_context=True, queue_name=OWN_QUEUE, priority=PRIORITY)
def change_tasks(context: Any, verb: str, ids: list[int], value: str = "") -> int:
    """Apply a verb to these tasks, some thousands at a time. Returns how many were changed."""
    # After a crash this runs again from the start. It skips tasks that have run and finished meanwhile.
    is_old = Q(finished_at__isnull=True) | Q(finished_at__lte=context.task_result.enqueued_at)
    backend: Any = task_backends[context.task_result.backend]
    tasks = rows_of("Task", backend.database).filter(is_old)
    chosen, count = TASK_VERBS[verb].with_value(backend.database, value), 0
    for start in range(0, len(ids), WINDOW):
        context.check()
        count += chosen.apply(tasks.filter(is_among(ids[start : start + WINDOW])), None)
        context.progress(min(start + WINDOW, len(ids)), len(ids))
    return count


def enqueue_change(using: str, verb: Verb, ids: Sequence[int]) -> list[int]:
    """Enqueue the tasks that apply a verb to the tasks with these ids. Returns their own ids."""
    change = change_tasks.using(backend=backend_of(using))
    value = [verb.value] if verb.value else []
    parts = (list(ids[start : start + MOST_IDS]) for start in range(0, len(ids), MOST_IDS))
    return [int(change.enqueue(verb.name, part, *value).id) for part in parts]
