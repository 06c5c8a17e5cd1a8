"""Changes many tasks by a task: more than a request can change in its time, or a group of failures at a rate.

A person has seen how many tasks would change, and has confirmed it. So the task has their ids, or the number of their
group, and it leaves out those that have finished since then: a task that is retried and fails again stays failed.

Its row has its position, how many were changed, and the date of the next batch. These are written in the transaction
that changes a batch. So after a crash no task is left out, none is counted twice and the rate stays the same, and a
worker that has lost the claim on that row changes nothing. At a rate, the task snoozes between two batches. So it
occupies no thread of a worker, which may be needed by the tasks that it retries.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Q
from django.db.models.functions import Extract, Now

from django_pglock.errors import ClaimLost, ConfigurationError, DuplicateTask
from django_pglock.store.failures import in_group
from django_pglock.store.operate import RETRY, VERBS, Verb
from django_pglock.store.statements import WINDOW, is_among, rows_of, windows
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.definition import task
from django_pglock.tasks.options import Unique
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import Snooze
from django_pglock.tasks.states import TaskStatus

#: The ids that one task takes: a row of about a megabyte.
MOST_IDS = 100_000
#: The lowest and the highest rate in tasks a second: one task in a quarter of an hour, and one window a second.
LOWEST_RATE, HIGHEST_RATE = 0.001, float(WINDOW)


class Work(NamedTuple):
    """What is to be changed: the tasks with these ids, or the group of failures; the related tasks as well?"""

    verb: str
    ids: Sequence[int] = ()
    value: str = ""
    fingerprint: int | None = None
    with_related: bool = False


class Batch(NamedTuple):
    """How many tasks were changed so far, whether that were all, and the seconds until the next batch."""

    done: int
    is_over: bool
    wait: float


@task(
    takes_context=True,
    queue_name=OWN_QUEUE,
    # The highest, because the queue may be full of the tasks that are to be cancelled.
    priority=100,
    # The statements may fail while a server restarts.
    max_attempts=10,
)
def change_tasks(
    context: Any,
    verb: str,
    ids: Sequence[int] = (),
    value: str = "",
    fingerprint: int | None = None,
    rate: float | None = None,
    with_related: bool = False,
) -> int:
    """Apply a verb to tasks, in batches: to those with these ids, or to a group of failures, at most ``rate`` a second.

    Returns how many were changed.
    """
    result, work = context.task_result, Work(verb, ids, value, fingerprint, with_related)
    backend: Any = task_backends[result.backend]
    limit = WINDOW if rate is None else max(1, math.floor(rate))
    seconds = 0.0 if rate is None else limit / rate
    while True:
        context.check()
        began = time.monotonic()
        claim = {"by": int(result.id), "attempt": context.fencing_token}
        batch = change_batch(backend.database, work, before=result.enqueued_at, limit=limit, seconds=seconds, **claim)
        if batch.is_over:
            return batch.done
        if rate is not None:
            # At least 0.1 s, because the pauses after shorter waits double.
            raise Snooze(max(0.1, batch.wait - (time.monotonic() - began)))


def change_batch(
    using: str, work: Work, *, before: datetime, limit: int, by: int, attempt: int, seconds: float = 0.0
) -> Batch:
    """Change the next ``limit`` tasks that have not finished since ``before``, for the claimed task ``by``.

    ``seconds`` is the time that a batch takes at least. Before it is over, nothing is changed, also by another worker
    after a crash. Tasks that cannot be changed now are skipped. Raises ``ClaimLost`` if the claim is no longer valid.
    Then nothing was changed.
    """
    rows = rows_of("Task", using)
    own = rows.filter(pk=by, attempts=attempt, status=TaskStatus.RUNNING)
    tasks = rows.filter(Q(finished_at__isnull=True) | Q(finished_at__lte=before))
    if work.fingerprint is not None:
        tasks = in_group(tasks, work.fingerprint)
    with transaction.atomic(using=using):
        [(state, now)] = own.values_list("progress", Extract(Now(), "epoch")) or [(None, 0)]
        state = state or {"done": 0, "total": len(work.ids) or tasks.count(), "position": 0}
        # Never longer than a batch takes, because the server's clock may have stepped back.
        if (wait := min(state.get("next_at", 0) - float(now), seconds)) > 0:
            return Batch(state["done"], is_over=False, wait=wait)
        ids, state["position"] = next_ids(tasks, work, state["position"], limit)
        if ids:
            verb, chosen = VERBS[work.verb], tasks.filter(is_among(ids))
            related = verb.related(chosen).ids if work.with_related else ()
            state["done"] += verb.apply(chosen, work.value)
            # Not counted: the total is that of the group.
            verb.apply(rows.filter(is_among(related)), work.value)
            state["next_at"] = float(now) + seconds
        if not own.update(progress=state):
            raise ClaimLost(f"Task {by} is no longer claimed by this attempt, so it changes nothing.")
    return Batch(state["done"], is_over=len(ids) < limit, wait=seconds)


def next_ids(tasks: Any, work: Work, position: int, limit: int) -> tuple[list[int], int]:
    """Return the next ids and the position behind them: in the list of the ids, or in the group the last id."""
    if work.fingerprint is None:
        return list(work.ids[position : position + limit]), position + limit
    later = tasks.filter(pk__gt=position).order_by("fingerprint", "pk")
    ids = list(later.values_list("pk", flat=True)[:limit])
    return ids, ids[-1] if ids else position


def enqueue_change(using: str, verb: Verb, ids: Sequence[int], value: str = "") -> list[int]:
    """Enqueue the tasks that apply a verb to the tasks with these ids. Returns their own ids.

    Raises ``ConfigurationError`` if no backend stores its tasks in the database ``using``.
    """
    change = change_tasks.using(backend=_backend_of(using))
    extra: Any = [value] if value else []
    return [int(change.enqueue(verb.name, list(some), *extra).id) for some in windows(ids, MOST_IDS)]


def enqueue_redrive(using: str, fingerprint: int, rate: float, *, dependants: bool = False) -> tuple[int, bool]:
    """Enqueue the task that retries a group of failures, at most ``rate`` tasks a second.

    ``dependants``: also the tasks that were cancelled because of them.

    Returns its id, and whether it is new: a group has one redrive at a time. Raises ``ValueError`` for a rate that is
    too low or too high, and ``ConfigurationError`` as ``enqueue_change`` does.
    """
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise ValueError(f"The rate is {rate:g} tasks a second; use {LOWEST_RATE:g} to {HIGHEST_RATE:g}.")
    unique = Unique("{fingerprint}", while_="unfinished", on_conflict="raise")
    work = change_tasks.using(backend=_backend_of(using), unique=unique)
    try:
        return int(work.enqueue(RETRY.name, fingerprint=fingerprint, rate=rate, with_related=dependants).id), True
    except DuplicateTask as there:
        return int(there.result_id), False


def redrives(using: str, fingerprints: Iterable[int]) -> dict[int, Any]:
    """Return the unfinished redrives of these groups, by fingerprint: their tasks with id, status and progress."""
    keys = {f"{change_tasks.module_path} {each}": each for each in fingerprints}
    # In these words and without an order, the planner can use no other index than that of unique keys.
    rows = rows_of("Task", using).filter(HAS_UNIQUE_KEY, unique_key__in=list(keys)).order_by()
    return {keys[row.unique_key]: row for row in rows.only("id", "status", "progress", "unique_key")}


def _backend_of(using: str) -> str:
    """Return the alias of a backend of this package whose tasks are in the database ``using``."""
    for backend in our_backends(using):
        return str(backend.alias)
    raise ConfigurationError(f"No backend in TASKS stores its tasks in the database {using!r}, so no task can be run.")
