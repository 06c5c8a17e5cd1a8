"""The last runs of a schedule: the tasks that its ticks have enqueued, the newest first.

No index lists the tasks of a function, because each enqueue of any task would add to it. Instead, each tick writes the
id of the task of the tick before into the ``meta`` of its own task. So the history is a chain, from ``last_task`` of
the schedule on, and each run costs one look into the primary key. The chain ends at a task that has been deleted.
"""

from __future__ import annotations

from typing import Any

from django_pglock.store.sql import rows_of, run

#: The key in ``meta`` of the id of the task that the tick before has enqueued.
PREVIOUS_RUN = "previous_run"

# A program may have written anything into ``meta``: what is not an id ends the chain, and so does an id that is not
# smaller, so that the chain has an end. LATERAL with LIMIT: else the planner may join by reading the whole table.
SCHEDULE_RUNS = f"""
WITH RECURSIVE run AS (
    SELECT id, meta ->> '{PREVIOUS_RUN}' AS previous, 1 AS place FROM {{task}} WHERE id = %s AND task_path = %s
    UNION ALL
    SELECT task.id, task.previous, run.place + 1
    FROM run CROSS JOIN LATERAL (
        SELECT id, meta ->> '{PREVIOUS_RUN}' AS previous FROM {{task}}
        WHERE id = CASE WHEN run.previous ~ '^[0-9]{{{{1,18}}}}$' THEN run.previous::bigint END AND id < run.id
          AND task_path || '' = %s
        LIMIT 1
    ) AS task
    WHERE run.place < %s
)
SELECT id FROM run
"""


def last_runs(using: str, task_path: str, last_task: int | None, *, limit: int = 20) -> list[Any]:
    """Return up to ``limit`` tasks that the ticks of a schedule have enqueued, the newest first, without arguments.

    ``last_task`` is that of the schedule's row. Tasks of "run now" are not among them. Two statements, which read by
    the primary key.
    """
    if last_task is None:
        return []
    ids = [id_ for (id_,) in run(using, SCHEDULE_RUNS, last_task, task_path, task_path, limit)]
    return list(rows_of("Task", using).filter(pk__in=ids).defer("args", "kwargs", "result").order_by("-pk"))
