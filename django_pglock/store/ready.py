"""Ready tasks: their queues and functions, which queues are paused, and which ready tasks no worker runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.db.models import Case, Value, When
from django.db.models.functions import Now

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import transaction_block
from django_pglock.store.liveness import alive, is_recent
from django_pglock.store.statements import IN_INDEX_ORDER, rows_of, run
from django_pglock.store.wake import wake
from django_pglock.tasks.queues import check_queue_name, check_text, is_served
from django_pglock.tasks.states import TaskStatus

#: The number of tasks of each queue whose functions are read.
MOST_READ = 1000

# The distinct queues that have ready tasks, with and without ``fair=``, by one index probe each. A DISTINCT would read
# every ready row.
_QUEUES = """(
    (SELECT queue FROM {{task}} WHERE status = 'READY' AND fair_key IS {null} ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT queue FROM {{task}} WHERE status = 'READY' AND fair_key IS {null} AND queue > {name}.queue
            ORDER BY queue LIMIT 1)
    FROM {name} WHERE {name}.queue IS NOT NULL
)"""
FIND_QUEUES = f"""
WITH RECURSIVE plain AS {_QUEUES.format(name="plain", null="NULL")},
fair AS {_QUEUES.format(name="fair", null="NOT NULL")},
found AS (
    SELECT queue, bool_or(is_fair) AS has_fair
    FROM (SELECT queue, false AS is_fair FROM plain UNION ALL SELECT queue, true FROM fair) AS each
    WHERE queue IS NOT NULL GROUP BY queue
)
"""
READY_QUEUES = f"{FIND_QUEUES}SELECT queue, has_fair FROM found"

# The first ready tasks of each queue. Tasks that no worker claims become the first ones in time, so it is enough to
# read these. The limits are subqueries. If a limit is a literal that is larger than the length of an average queue, the
# planner reads and sorts all tasks of a queue that is much longer than average.
FIRST_READY = """found CROSS JOIN LATERAL (
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = found.queue
     ORDER BY task.priority DESC, task.id LIMIT (SELECT %s::bigint))
    UNION ALL
    (SELECT task.task_path, task.backend, task.enqueued_at FROM {task} AS task
     WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = found.queue
     ORDER BY task.fair_key, task.priority DESC, task.id LIMIT (SELECT %s::bigint))) AS first"""

# The functions that ready tasks call.
READY_PATHS = f"{FIND_QUEUES}SELECT DISTINCT found.queue, first.task_path FROM {FIRST_READY}"


def ready(tasks: Any) -> Any:
    """Return the tasks that can be claimed now, in the order in which they run: by priority, then as enqueued."""
    return tasks.filter(status=TaskStatus.READY).order_by("-priority", "id")


def ready_queues(using: str) -> dict[str, bool]:
    """Return the queues that have ready tasks, and whether some of these tasks have ``fair=``."""
    return dict(run(using, READY_QUEUES, prepared=True))


def ready_paths(using: str) -> list[tuple[str, str]]:
    """Return the functions that the first ready tasks of each queue call, as (queue, path)."""
    return run(using, READY_PATHS, MOST_READ, MOST_READ)


#: The new status of a due task: READY, or BLOCKED if it must be admitted to its lock key first.
DUE_STATUS = Case(
    When(lock_key__isnull=True, then=Value(TaskStatus.READY.value)), default=Value(TaskStatus.BLOCKED.value)
)

# Seconds until the next task or the next token of a rate is due. Zero or less: one is due. NULL: there is none.
NEXT_DUE = """
SELECT EXTRACT(EPOCH FROM LEAST(
    (SELECT run_after FROM {task} WHERE status = 'SCHEDULED' ORDER BY run_after LIMIT 1),
    (SELECT opens_at FROM {rate_limit} WHERE opens_at IS NOT NULL ORDER BY opens_at LIMIT 1)
) - clock_timestamp())::float8
"""


def due(tasks: Any) -> Any:
    """Return the scheduled tasks whose time has come, the longest overdue first."""
    return tasks.filter(status=TaskStatus.SCHEDULED, run_after__lte=Now()).order_by("run_after", "id")


def next_due_in(using: str) -> float | None:
    """Return the seconds until the next scheduled task is due. Zero or less: one is due. None: there is none."""
    [(seconds,)] = run(using, NEXT_DUE, first=IN_INDEX_ORDER)
    return None if seconds is None else float(seconds)


# Ready tasks whose function no living worker knows, or one worker does not know.
UNKNOWN = f"""
{FIND_QUEUES.rstrip()}, known AS MATERIALIZED (
    SELECT jsonb_array_elements_text(worker.task_paths) AS path FROM {{worker}} AS worker
    WHERE {is_recent("worker.heartbeat_at")}
      AND worker.id = COALESCE(%s::uuid, worker.id)
)
SELECT first.task_path, found.queue, count(*), min(first.enqueued_at) AS oldest
FROM {FIRST_READY}
WHERE first.task_path NOT IN (SELECT path FROM known)
  AND first.backend = COALESCE(%s::text, first.backend)
GROUP BY first.task_path, found.queue
ORDER BY oldest, first.task_path
"""


class UnknownTasks(NamedTuple):
    """Ready tasks of one function and queue that no living worker knows: how many were read, and since when."""

    task_path: str
    queue: str
    waiting: int
    oldest: datetime


def unknown(
    using: str, *, limit: int = 1000, worker: UUID | None = None, backend: str | None = None
) -> list[UnknownTasks]:
    """Return the ready tasks whose function no living worker knows, the longest waiting first.

    - ``limit``: the first tasks of each queue are read, up to this number, by index.
    - ``worker``: return the tasks whose function this worker does not know, even if other workers know it.
    - ``backend``: only tasks of this alias in TASKS.

    It does not check whether a worker that knows a function also serves the queue.
    """
    limit_of_heartbeats = get_settings().HEARTBEAT_LIMIT
    return [UnknownTasks(*row) for row in run(using, UNKNOWN, limit_of_heartbeats, worker, limit, limit, backend)]


def unserved_queues(using: str) -> list[str]:
    """Return the queues that have ready tasks, are not paused, and that no living worker serves."""
    asked = list(alive(rows_of("Worker", using)).values_list("queues", flat=True))
    waiting = set(ready_queues(using)) - paused_queues(using).keys()
    return sorted(name for name in waiting if not any(is_served(name, each) for each in asked))


# Pausing and resuming queues.


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
