"""When a task ends, those who wait for it are told: other tasks (``after=``), and processes (``result.wait()``).

A waiter writes a row into the table of waiters, commits it, and then checks whether the task has ended. The transaction
that ends a task commits the end, and then queries for waiters. So one of the two always sees the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from django.db import OperationalError
from psycopg.errors import LockNotAvailable

from django_pglock.store.admit import admit
from django_pglock.store.after_commit import after_commit
from django_pglock.store.sql import array_of_numbers, run, run_together
from django_pglock.store.wait import DONE_CHANNEL, ended
from django_pglock.store.wake import SCHEDULED_CHANNEL, wake
from django_pglock.tasks.states import TaskStatus

DEPENDENCY_FAILED = "django_pglock.errors.DependencyFailed"
#: Waiters that upkeep reads in one round.
WAITERS_AT_ONCE = 5000
#: Waiters that one statement releases.
RELEASED_AT_ONCE = 200

# Which tasks with ids between two numbers have waiters. Asked first, because waiters are rare, and planning
# ``RELEASE`` takes the server longer than settling a task. The ids of tasks that are settled together are mostly close
# together, and one walk along an index is cheaper than a probe for each.
AWAITED_BETWEEN = "SELECT awaited FROM {waiter} WHERE awaited BETWEEN %s AND %s ORDER BY awaited LIMIT %s"

# Which of these tasks have waiters. Asked where many other tasks between them have.
AWAITED = "SELECT DISTINCT awaited FROM {waiter} WHERE awaited = ANY (%s::bigint[])"

# Releases the waiters of tasks that have ended or do not exist any more. A waiting task moves on when nothing is left
# that it waits for, and is cancelled when a task that it waits for did not succeed; processes that listen are notified.
# The waits are counted down in the row of the waiting task, so two tasks that end at once cannot miss each other; the
# rows are locked in order, so they cannot deadlock. The statement begins with the waiters, who are few, so it costs
# next to nothing when there are none. It releases a limited number of them: the planner expects one waiting task and
# compares each with each, which takes a minute for twenty thousand. Each row says how many waiters were released; if
# this is the limit, there may be more.
#
# If somebody's open transaction has locked a waiting task, this waits for a moment only, and fails. The second
# statement skips such a task and leaves its waiters for upkeep to find. It is not the first choice, because most of
# those who have such a row locked do the same as this statement, for another task that it waits for.
RELEASE = """
WITH done AS MATERIALIZED (
    SELECT waiter.id, waiter.awaited, waiter.task_id, task.status IS DISTINCT FROM 'SUCCESSFUL' AS has_failed
    FROM {waiter} AS waiter LEFT JOIN {task} AS task ON task.id = waiter.awaited
    WHERE waiter.awaited = ANY (%s::bigint[]) AND (task.id IS NULL OR task.finished_at IS NOT NULL)
      AND (SELECT set_config('lock_timeout', '100ms', true)) <> ''
    ORDER BY waiter.awaited, waiter.task_id LIMIT %s
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task WHERE task.id = ANY (ARRAY(SELECT task_id FROM done))
    ORDER BY task.id FOR NO KEY UPDATE OF task
), gone AS MATERIALIZED (
    DELETE FROM {waiter} AS waiter USING done
    WHERE waiter.id = done.id AND (done.task_id IS NULL OR done.task_id = ANY (ARRAY(SELECT id FROM locked)))
    RETURNING done.awaited, done.task_id, done.has_failed
), child AS MATERIALIZED (
    SELECT task_id AS id, count(*)::int AS done, bool_or(has_failed) AS has_failed,
           min(awaited) FILTER (WHERE has_failed) AS failed
    FROM gone WHERE task_id IS NOT NULL GROUP BY task_id
), moved AS (
    UPDATE {task} AS task
    SET waits_for = GREATEST(0, task.waits_for - child.done),
        status = CASE WHEN child.has_failed THEN 'CANCELLED'
                      WHEN task.waits_for > child.done THEN 'BLOCKED'
                      WHEN task.run_after > clock_timestamp() THEN 'SCHEDULED'
                      WHEN task.lock_key IS NOT NULL THEN 'BLOCKED'
                      ELSE 'READY' END,
        finished_at = CASE WHEN child.has_failed THEN clock_timestamp() END,
        expires_at = CASE WHEN child.has_failed THEN {expires_at} END
    FROM child
    WHERE task.id = child.id AND task.id = ANY (ARRAY(SELECT id FROM locked))
      AND task.status || '' = 'BLOCKED' AND task.waits_for > 0
    RETURNING task.id, task.status, task.queue, task.lock_key, task.attempts - task.uncounted AS number, task.waits_for,
              child.failed
), recorded AS (
    INSERT INTO {attempt} (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
    SELECT id, number, NULL, clock_timestamp(), clock_timestamp(), 'FAILED', %s, format(%s, failed)
    FROM moved WHERE status = 'CANCELLED'
    ON CONFLICT DO NOTHING
), told AS MATERIALIZED (
    SELECT count(pg_notify(%s, awaited::text)) FROM (SELECT DISTINCT awaited FROM gone WHERE task_id IS NULL) AS heard
)
SELECT moved.id, moved.status, moved.queue, moved.lock_key, moved.waits_for, (SELECT count(*) FROM gone)
FROM told LEFT JOIN moved ON true
"""
RELEASE_UNLOCKED = RELEASE.replace("OF task\n", "OF task SKIP LOCKED\n")

# Some waiters in the order of their ids, and for which of them the task has ended or does not exist any more: a crash
# has kept them from being told.
STRAY_WAITERS = """
SELECT waiter.id, CASE WHEN task.id IS NULL OR task.finished_at IS NOT NULL THEN waiter.awaited END
FROM (SELECT id, awaited FROM {waiter} WHERE id > %s ORDER BY id LIMIT %s) AS waiter
LEFT JOIN {task} AS task ON task.id = waiter.awaited
ORDER BY waiter.id
"""


def release(using: str, awaited: Iterable[int]) -> int:
    """Release the waiters of these tasks, as far as these have ended. Returns how many waiting tasks have moved.

    A waiting task moves on when the last task that it waits for has ended. It is cancelled when one of them did not
    succeed, and so are the tasks that wait for it. If another transaction has locked the waiting task, upkeep does this
    later.
    """
    moved, ids = 0, set(awaited)
    while ids and (ids := _awaited(using, ids)):
        cancelled, released = [], RELEASED_AT_ONCE
        while released == RELEASED_AT_ONCE:
            rows, released = _release(using, sorted(ids))
            moved += len(rows)
            cancelled += [id_ for id_, status, *_ in rows if status == TaskStatus.CANCELLED]
        ids = set(cancelled)
    return moved


def release_on_commit(using: str, awaited: Collection[int]) -> None:
    """Release once the current transaction is committed."""
    if awaited:
        after_commit(using, release, using, awaited)


def release_ended_on_commit(using: str, awaited: Collection[int]) -> None:
    """Release those of these tasks that have ended, once the current transaction is committed.

    Few have ended, and a query for these costs less than the release.
    """
    after_commit(using, _release_ended, using, awaited)


def orphaned_waiters(using: str, after: int, *, limit: int = WAITERS_AT_ONCE) -> list[tuple[int, int | None]]:
    """Return the next waiters behind the id ``after``: their ids, and the task if it has ended or does not exist."""
    return run(using, STRAY_WAITERS, after, limit)


def _release_ended(using: str, awaited: Collection[int]) -> None:
    release(using, [id_ for id_, _ in ended(using, list(awaited))])


def _awaited(using: str, ids: set[int]) -> set[int]:
    most = 2 * len(ids)
    found = run(using, AWAITED_BETWEEN, min(ids), max(ids), most)
    if len(found) == most:
        found = run(using, AWAITED, array_of_numbers(ids))
    return ids & {id_ for (id_,) in found}


def _release(using: str, ids: list[int]) -> tuple[list[tuple[int, str, str, str | None, int]], int]:
    """Release some waiters; return the tasks that this has moved, and how many waiters were released."""
    text = "This task was to run after task %s, which did not succeed or was deleted."
    values = (array_of_numbers(ids), RELEASED_AT_ONCE, DEPENDENCY_FAILED, text, DONE_CHANNEL)
    # As a message, which is READ COMMITTED: at REPEATABLE READ, to wait for a row that changes is a failure.
    try:
        rows = run_together(using, (RELEASE, values))
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        # Somebody's open transaction has locked one of the waiting tasks. It must not delay the others.
        rows = run_together(using, (RELEASE_UNLOCKED, values))
    [told] = {row[-1] for row in rows}
    moved = [row[:-1] for row in rows if row[0] is not None]
    wake(using, (queue for _, status, queue, *_ in moved if status == TaskStatus.READY))
    wake(using, (queue for _, status, queue, *_ in moved if status == TaskStatus.SCHEDULED), SCHEDULED_CHANNEL)
    # A cancelled task blocks no other task of its key any more, whatever else it waited for.
    admit(using, (key for _, status, _, key, waits_for in moved if waits_for == 0 or status == TaskStatus.CANCELLED))
    return moved, told
