"""The last runs of a schedule: the tasks that its ticks have enqueued, the newest first.

No index lists the tasks of a function, because each enqueue of any task would have to update it. Instead, each tick
writes the id of the previous tick's task into the ``meta`` of its own task. So the history is a linked list that begins
at ``last_task`` of the schedule, and each run costs one probe of the primary key. It ends at a task that was deleted.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from django_pglock.store.statements import rows_of, run

#: The key in ``meta`` for the id of the task that the previous tick has enqueued.
PREVIOUS_RUN = "previous_run"

# A program may have written any value into ``meta``. A value that is not an id ends the list. So does an id that is not
# smaller than the one before, so that the list cannot be a circle. LATERAL with LIMIT, because otherwise the planner
# may read the whole table for the join.
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

    ``last_task`` is from the schedule's row. Tasks of ``run_now`` are not in the list. Sends two statements, which read
    by the primary key.
    """
    if last_task is None:
        return []
    ids = [id_ for (id_,) in run(using, SCHEDULE_RUNS, last_task, task_path, task_path, limit)]
    found = rows_of("Task", using).filter(pk__in=ids).defer("args", "kwargs", "result", "stack")
    return sorted(found, key=attrgetter("pk"), reverse=True)
