"""A worker claims ready tasks of one queue. One statement makes each task RUNNING and counts one more attempt.

The text of the statement is made once for the functions that a worker knows. A claim only fills a few values into it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple
from uuid import UUID

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals
from django_pglock.store.statements import IN_INDEX_ORDER, array_of_texts, run
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.call_keys import GROUPED
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.queues import OWN_QUEUE

# Claims the first free tasks of a queue, unless the queue is paused. MATERIALIZED: otherwise the planner could execute
# the selection again for each joined row, and so claim more tasks than the limit. FOR NO KEY UPDATE: a transaction that
# enqueues a task with ``after=`` has locked the key of the awaited task.
CLAIM = """
WITH claimed AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = %s AND {conditions}
      AND NOT EXISTS (SELECT FROM {queue} WHERE paused_at IS NOT NULL AND name = %s)
    ORDER BY task.priority DESC, task.id LIMIT %s
    FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {task} AS task
SET status = 'RUNNING', attempts = {next_attempt}, worker = '{worker}',
    started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
WHERE task.id = ANY (ARRAY(SELECT id FROM claimed))
RETURNING {claim_columns}
"""


class ClaimStatement(NamedTuple):
    """The statement that claims tasks of a queue for one worker.

    Nearly all values are in its text: the server can use a partial index in every plan mode, and Python binds only the
    name of the queue, the limit and, for a claim behind a task, the priority and the id of this task.
    """

    using: str
    text: str

    def execute(self, limit: int, queue: str, *position: int) -> list[tuple[Any, ...]]:
        """Claim up to ``limit`` tasks on this thread's connection; return their columns, in no order."""
        return run(self.using, self.text, queue, *position, queue, limit, prepared=True)


def claim_statement(
    using: str, *, worker: UUID, paths: Sequence[str], behind: bool = False, backend: str | None = None
) -> ClaimStatement:
    """Return the statement that claims tasks of a queue for a worker.

    - ``paths``: the functions that the worker knows. Tasks of other functions are not claimed.
    - ``backend``: the alias in TASKS with which the tasks were enqueued; None: any.
    - ``behind``: claim only tasks of one priority that were enqueued after one task.
    """
    # SQL has no empty list. No function has an empty path.
    conditions = [f"task.task_path IN ({_listed(using, paths or [''])})"]
    if behind:
        conditions.append("task.priority = %s AND task.id > %s")
    if backend is not None:
        # Projects may share a database, each with a backend. Of this package's own tasks, a worker runs its project's.
        known = _listed(using, [each.alias for each in our_backends(using)] or [backend])
        own = f"task.queue = '{OWN_QUEUE}' AND task.backend IN ({known})"
        conditions.append(f"(task.backend IN ({_listed(using, [backend])}) OR {own})")
    text = CLAIM.replace("{conditions}", " AND ".join(conditions)).replace("{worker}", str(worker))
    return ClaimStatement(using, text)


def _listed(using: str, texts: Iterable[str]) -> str:
    """Return texts as literals in a statement that has values and names in braces."""
    connection = connection_for(using)
    connection.ensure_connection()
    listed = ", ".join(literals(connection, texts))
    return listed.replace("%", "%%").replace("{", "{{").replace("}", "}}")


def claims_of(rows: Iterable[tuple[Any, ...]], worker: UUID) -> list[Claim]:
    """Return the rows of a claiming statement as claims, in the order in which they run."""
    # All columns are named, because to pass the others as ``*others`` takes 1.5 times as long for a thousand claims.
    claims = [
        Claim(
            id_, attempt, worker, backend, queue, priority, path, args, kwargs, meta, retries, max_retries, rescues,
            run_after, enqueued_at, started_at, last_attempted_at, lock_key, uncounted,
        )
        for (
            id_, attempt, backend, queue, priority, path, args, kwargs, meta, retries, max_retries, rescues,
            run_after, enqueued_at, started_at, last_attempted_at, lock_key, uncounted,
        ) in rows
    ]  # fmt: skip
    # Two sorts, because a sort by one attribute calls no Python function. The second one is stable: tasks of the same
    # priority keep the order of their ids.
    claims.sort(key=attrgetter("id"))
    claims.sort(key=attrgetter("priority"), reverse=True)
    return claims


RUNNING_CLAIM = """
SELECT {claim_columns} FROM {task} AS task
WHERE task.id = %s AND task.attempts = %s AND task.worker = %s AND task.status || '' = 'RUNNING'
"""


def running_claims(using: str, task: int, attempt: int, worker: UUID) -> list[Claim]:
    """Return the claim of a task that runs this attempt on this worker, if it still does."""
    return claims_of(run(using, RUNNING_CLAIM, task, attempt, worker), worker)


# Claims one task of each key, beginning behind the last key that was served. Then it claims a second task of each key,
# and so on, up to the limit. It goes from key to key by index probes. So its cost depends neither on the number of keys
# nor on the number of tasks. A key is skipped if this worker knows no function of the tasks that wait there. One claim
# reads at most a thousand keys. Each row also has the key behind which the next claim continues. It is empty if the
# last key was read. If nothing was claimed, there is one row without a claim.
CLAIM_FAIR = """
WITH RECURSIVE keys AS (
    SELECT %s::text AS fair_key, 0 AS number, 0 AS found, false AS is_known
    WHERE NOT EXISTS (SELECT FROM {queue} WHERE name = %s AND paused_at IS NOT NULL)
    UNION ALL
    SELECT next.fair_key, number + 1, found + next.is_known::int, next.is_known
    FROM keys CROSS JOIN LATERAL (
        SELECT first.fair_key, (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = first.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id LIMIT 1) IS NOT NULL AS is_known
        FROM (SELECT task.fair_key::text FROM {task} AS task
              WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
                AND task.fair_key > keys.fair_key ORDER BY task.fair_key LIMIT 1) AS first
    ) AS next
    WHERE number < 1000 AND found < %s
), chosen AS MATERIALIZED (
    SELECT next.id, row_number() OVER (ORDER BY next.rank, keys.fair_key) AS place
    FROM keys CROSS JOIN LATERAL (
        SELECT locked.id, row_number() OVER () AS rank FROM (
            SELECT task.id FROM {task} AS task
            WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = %s
              AND task.fair_key = keys.fair_key AND task.task_path = ANY (%s::text[])
              AND task.backend = COALESCE(%s::text, task.backend)
            ORDER BY task.priority DESC, task.id
            LIMIT ceil(%s::numeric / (SELECT max(found) FROM keys))
            FOR NO KEY UPDATE OF task SKIP LOCKED) AS locked
    ) AS next
    WHERE keys.is_known
    ORDER BY next.rank, keys.fair_key LIMIT %s
), claimed AS (
    UPDATE {task} AS task
    SET status = 'RUNNING', attempts = {next_attempt}, worker = %s,
        started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
    FROM chosen WHERE task.id = chosen.id AND task.id = ANY (ARRAY(SELECT id FROM chosen))
    RETURNING chosen.place, {claim_columns}
)
SELECT walk.ended_at, claimed.*
FROM (SELECT CASE WHEN max(number) = 1000 OR max(found) = %s THEN max(fair_key) ELSE '' END AS ended_at
      FROM keys) AS walk
LEFT JOIN claimed ON true
ORDER BY claimed.place
"""


def claim_fair(
    using: str, *, worker: UUID, queue: str, paths: Sequence[str], after: str, limit: int, backend: str | None = None
) -> tuple[list[Claim], str]:
    """Claim tasks with ``fair=``, round-robin over their keys, beginning behind the key ``after``.

    Returns the claims in the order in which they run, and the key behind which to continue. It is empty if there is no
    further key. Otherwise there may be more tasks, even if no claim is returned: one call reads a limited number of
    keys.
    """
    here = (queue, array_of_texts(paths), backend)
    walk = (after, queue, *here, queue, limit)
    rows = run(using, CLAIM_FAIR, *walk, *here, limit, limit, str(worker), limit, prepared=True)
    claims = [Claim(id_, attempt, worker, *columns) for _, place, id_, attempt, *columns in rows if place is not None]
    return claims, rows[0][0]


# Claims the tasks that wait at the lock key of a claimed task and are of its group, backend and queue, and those that
# are SCHEDULED only because of ``gather``. Other queues may be paused, or not served by the worker. No other worker can
# claim them at the same time, unless this worker was frozen and has lost its claim. Then ``first`` has no row, and no
# task is claimed.
#
# If several runs of a group may be in progress at the same time, ``ADMIT`` in admit.py counts them by their first
# tasks. So the concurrency of the others becomes negative. It stays so if they run again, until one is admitted.
#
# With ``lock=`` the tasks must be the next ones in the order of the key. A task is not claimed if an older task at this
# key belongs to another group or queue, waits for other tasks (``after=``), or has a locked row. Tasks that gather have
# no place at the key yet. They are claimed if all older tasks at the key are claimed. The comment at ADMIT in admit.py
# says why keys are compared by ranges.
CLAIM_GROUP = """
WITH first AS MATERIALIZED (
    SELECT id, task_path, backend, queue, group_key FROM {task}
    WHERE id = %s AND attempts = %s AND status || '' = 'RUNNING' FOR NO KEY UPDATE
), behind AS MATERIALIZED (
    (SELECT task.id, compared.is_alike
     FROM {task} AS task CROSS JOIN LATERAL (
         SELECT COALESCE((task.task_path, task.backend, task.queue, task.group_key, task.waits_for)
                         = (SELECT task_path, backend, queue, group_key, 0 FROM first), false) AS is_alike) AS compared
     WHERE (task.lock_key, task.status) BETWEEN (%s, 'BLOCKED') AND (%s, 'BLOCKED')
       AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND (%s OR compared.is_alike)
     ORDER BY task.lock_key, task.status, task.id LIMIT %s)
    UNION ALL
    (SELECT task.id, true FROM {task} AS task
     WHERE (task.lock_key, task.status) BETWEEN (%s, 'SCHEDULED') AND (%s, 'SCHEDULED')
       AND task.lock_key IS NOT NULL AND task.finished_at IS NULL AND task.waits_for = 0
       AND (task.task_path, task.backend, task.queue, task.group_key)
           = (SELECT task_path, backend, queue, group_key FROM first)
       AND task.started_at IS NULL AND task.run_after <= clock_timestamp() + make_interval(secs => %s)
     ORDER BY task.lock_key, task.status, task.id LIMIT %s)
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT id FROM behind WHERE is_alike)) AND task.status || '' IN ('BLOCKED', 'SCHEDULED')
    FOR NO KEY UPDATE SKIP LOCKED
), others AS MATERIALIZED (
    SELECT id FROM (
        SELECT id, is_free, bool_and(is_free) OVER (ORDER BY id) AS is_next
        FROM (SELECT id, is_alike AND id IN (SELECT id FROM locked) AS is_free FROM behind) AS each
    ) AS each
    WHERE CASE WHEN %s THEN is_next ELSE is_free END ORDER BY id LIMIT %s
)
UPDATE {task} AS task
SET status = 'RUNNING', attempts = {next_attempt}, worker = %s, concurrency = -abs(task.concurrency),
    started_at = COALESCE(started_at, statement_timestamp()), last_attempted_at = statement_timestamp()
WHERE task.id = ANY (ARRAY(SELECT id FROM others))
RETURNING {claim_columns}
"""


def claim_group(using: str, first: Claim, *, limit: int, gather: float) -> list[Claim]:
    """Claim up to ``limit`` tasks that wait in the group of the claimed task ``first``, for the same worker.

    ``gather`` is the time in seconds for which tasks of the group are held back.
    """
    key, has_order = (first.lock_key, first.lock_key), not (first.lock_key or "").startswith(GROUPED)
    waiting, gathering = (*key, has_order, limit), (*key, gather, limit)
    values = (first.id, first.attempt, *waiting, *gathering, has_order, limit, first.worker)
    rows = run(using, CLAIM_GROUP, *values, first=IN_INDEX_ORDER)
    return sorted(
        (Claim(id_, attempt, first.worker, *columns) for id_, attempt, *columns in rows), key=attrgetter("id")
    )
