"""Gives back claims whose answer was lost: by the table a worker has them, but the worker does not know of them.

Without this, such a task would stay RUNNING as long as its worker lives.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from django_pglock.store.admit import admit
from django_pglock.store.release import release
from django_pglock.store.statements import run, run_by_index
from django_pglock.store.wake import wake
from django_pglock.tasks.states import TaskStatus

# The tasks are found first, in the order of an index. When a row is locked, its conditions are checked again, because
# the row may have changed.
#
# Claims that were made after the worker has listed its tasks in flight are not given back. Neither are claims of lock
# keys for whose groups threads of the worker are claiming at this moment. A claim whose date is
# far ahead of the clock was made before that, and the clock has been put back since.
GIVE_BACK = """
WITH mine AS MATERIALIZED (
    SELECT id FROM {task} WHERE status = 'RUNNING' AND worker BETWEEN %s AND %s ORDER BY worker
)
UPDATE {task} AS task
SET status = CASE WHEN task.cancel_requested_at IS NOT NULL THEN 'CANCELLED'
                  WHEN task.lock_key IS NOT NULL THEN 'BLOCKED' ELSE 'READY' END,
    finished_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN clock_timestamp() END, worker = NULL,
    uncounted = LEAST(uncounted, attempts - 1) + 1,
    expires_at = CASE WHEN task.cancel_requested_at IS NOT NULL THEN {expires_at} END,
    started_at = CASE WHEN started_at = last_attempted_at THEN NULL ELSE started_at END
WHERE task.id = ANY (ARRAY(SELECT id FROM mine)) AND task.status || '' = 'RUNNING'
  AND task.worker = %s AND task.id <> ALL (%s::bigint[])
  AND (task.last_attempted_at < LEAST(clock_timestamp() - make_interval(secs => %s), %s::timestamptz)
       OR task.last_attempted_at > GREATEST(clock_timestamp(), %s::timestamptz) + interval '1 minute')
  AND COALESCE(task.lock_key <> ALL (%s::text[]), true)
RETURNING task.id, task.status, task.queue, task.lock_key
"""


def server_time(using: str) -> str:
    """Return the time of the server's clock as text of the server, so that no time zone setting changes it."""
    [(now,)] = run(using, "SELECT clock_timestamp()::text")
    return str(now)


def give_back(
    using: str,
    worker: UUID,
    in_flight: Iterable[int],
    *,
    older_than: float = 0.0,
    before: str | None = None,
    except_keys: Iterable[str] = (),
) -> int:
    """Give back the tasks that ``worker`` has by the table and whose ids are not in ``in_flight``.

    Only claims are given back that are older than ``older_than`` seconds, that were made before ``before``, a moment
    of ``server_time()`` (None: any), and whose lock key is not in ``except_keys``. Returns the number of tasks.
    """
    values = (worker, worker, worker, list(in_flight), older_than, before, before, list(except_keys))
    given_back = run_by_index(using, GIVE_BACK, *values)
    # The worker may have no free thread, and other workers may sleep.
    wake(using, (queue for _, status, queue, _ in given_back if status == TaskStatus.READY))
    admit(using, (key for *_, key in given_back))
    release(using, (id_ for id_, status, *_ in given_back if status == TaskStatus.CANCELLED))
    return len(given_back)
