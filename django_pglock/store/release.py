"""When a task ends, its waiters are released: other tasks (``after=``), and processes (``result.wait()``).

A waiter inserts a row into the table of waiters, commits it, and then checks whether the task has ended. The worker
that ends a task commits the end, and then queries for waiters. So at least one of the two sees the other.

Tasks that wait for a date are promoted here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from django.db import OperationalError, transaction
from django.db.models import F
from django.db.models.functions import Now
from psycopg.errors import LockNotAvailable

from django_pglock.keys.reserved import UPKEEP
from django_pglock.store.admit import admit, admit_on_commit, unsynced
from django_pglock.store.marking import first_free, mark
from django_pglock.store.ready import DUE_STATUS, due
from django_pglock.store.statements import BY_INDEX, array_of_numbers, rows_of, run, windows
from django_pglock.store.wake import after_commit, wake, wake_parents
from django_pglock.tasks.states import TaskStatus

#: Processes that wait for a result listen here; the payload is the task's id.
DONE_CHANNEL = "django_pglock_done"

# Inserts a waiter row for each task that this process waits for, and deletes rows of tasks that it no longer waits for.
# Rows that ``RELEASE`` deletes at this moment are skipped, because two transactions that delete several rows in
# different orders could deadlock.
WRITE_WAITERS = """
WITH gone AS (
    DELETE FROM {waiter} WHERE id = ANY (ARRAY(
        SELECT id FROM {waiter} WHERE id = ANY (%s::bigint[]) FOR UPDATE SKIP LOCKED))
)
INSERT INTO {waiter} (awaited) SELECT unnest(%s::bigint[]) RETURNING awaited, id
"""

# The tasks of a list of ids, and whether each has ended.
FIND_ENDED = "SELECT id, finished_at IS NOT NULL FROM {task} WHERE id = ANY (%s::bigint[])"


def write_waiters(using: str, awaited: Sequence[int], *, instead_of: Sequence[int]) -> dict[int, int]:
    """Write a waiter row for each of these tasks, and delete earlier rows.

    The end of a task is notified on ``DONE_CHANNEL``. ``instead_of``: the ids of the earlier rows. Returns the ids of
    the new rows by the ids of the tasks. Afterwards the caller must check whether a task has already ended.
    """
    values = (array_of_numbers(instead_of), array_of_numbers(awaited))
    return dict(run(using, WRITE_WAITERS, *values))


def ended(using: str, ids: Sequence[int]) -> list[tuple[int, bool]]:
    """Return those of these tasks that have ended, with True, and those that do not exist, with False."""
    is_finished = dict(run(using, FIND_ENDED, array_of_numbers(ids)))
    return [(id_, id_ in is_finished) for id_ in ids if is_finished.get(id_, True)]


DEPENDENCY_FAILED = "django_pglock.errors.DependencyFailed"
#: Like the last line of a traceback, in which people find the message.
DEPENDENCY_TEXT = "DependencyFailed: This task was to run after task %s, which did not succeed or was deleted."
#: The number of waiters that upkeep reads in one round.
WAITERS_AT_ONCE = 5000
#: The largest number of waiters that one statement releases.
RELEASED_AT_ONCE = 200

# The tasks in a range of ids that have waiters. This is the first query, because waiters are rare, and the server needs
# longer to plan ``RELEASE`` than to settle a task. The ids of tasks that are settled together are mostly close to each
# other, and one index range scan is cheaper than a probe for each id.
AWAITED_BETWEEN = "SELECT awaited FROM {waiter} WHERE awaited BETWEEN %s AND %s ORDER BY awaited LIMIT %s"

# The tasks of a list of ids that have waiters. This is the second query, for a range in which many other tasks have
# waiters, too.
AWAITED = "SELECT DISTINCT awaited FROM {waiter} WHERE awaited = ANY (%s::bigint[])"

# Releases the waiters of tasks that have ended or no longer exist. A waiting task leaves BLOCKED when it has nothing
# more to wait for. It is cancelled if a task of its ``after=`` did not succeed. Waiting processes are notified.
#
# The waiters of ``after_ended=`` stay, marked by ``has_ended``, so that pruning keeps what the waiting task may read.
#
# ``waits_for`` in the row of the waiting task is decremented under its row lock. So if two tasks end at the same time,
# both are counted. The rows are locked in the order of their ids, so two statements cannot deadlock. The statement
# begins with the waiters, which are few, so it is cheap if there are none. It releases a limited number of waiters,
# because the planner expects one waiting task and compares each pair. For twenty thousand this takes a minute. Each row
# of the answer has the number of released waiters. If this is the limit, there may be more. The task of each waiter is
# looked up by a subquery with LIMIT: a join might read all tasks for each waiter (statements.py).
#
# If another open transaction has locked a waiting task, this statement waits for a moment only, and then fails.
# ``RELEASE_UNLOCKED`` then skips the locked task, and upkeep releases its waiters later. ``RELEASE_UNLOCKED`` is not
# used first: in most cases the other transaction only executes ``RELEASE`` for another dependency of the same waiting
# task, and soon ends.
RELEASE = """
WITH done AS MATERIALIZED (
    SELECT waiter.id, waiter.awaited, waiter.task_id, waiter.has_ended IS NOT NULL AS stays,
           waiter.has_ended IS NULL AND task.status IS DISTINCT FROM 'SUCCESSFUL' AS has_failed
    FROM {waiter} AS waiter LEFT JOIN LATERAL (
        SELECT task.id, task.status, task.finished_at FROM {task} AS task WHERE task.id = waiter.awaited LIMIT 1
    ) AS task ON true
    WHERE waiter.awaited = ANY (%s::bigint[]) AND (task.id IS NULL OR task.finished_at IS NOT NULL)
      AND waiter.has_ended IS NOT TRUE
    ORDER BY waiter.awaited, waiter.task_id + 0 LIMIT %s
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task WHERE task.id = ANY (ARRAY(SELECT task_id FROM done))
    ORDER BY task.id FOR NO KEY UPDATE OF task
), gone AS MATERIALIZED (
    DELETE FROM {waiter} AS waiter USING done
    WHERE waiter.id = done.id AND waiter.id = ANY (ARRAY(SELECT id FROM done WHERE NOT stays))
      AND (done.task_id IS NULL OR done.task_id = ANY (ARRAY(SELECT id FROM locked)))
    RETURNING done.awaited, done.task_id, done.has_failed
), marked AS MATERIALIZED (
    UPDATE {waiter} AS waiter SET has_ended = true FROM done
    WHERE waiter.id = done.id AND waiter.id = ANY (ARRAY(SELECT id FROM done WHERE stays))
      AND waiter.has_ended IS FALSE AND done.task_id = ANY (ARRAY(SELECT id FROM locked))
    RETURNING done.awaited, done.task_id, false AS has_failed
), released AS MATERIALIZED (
    SELECT * FROM gone UNION ALL SELECT * FROM marked
), child AS MATERIALIZED (
    SELECT task_id AS id, count(*)::int AS done, bool_or(has_failed) AS has_failed,
           min(awaited) FILTER (WHERE has_failed) AS failed
    FROM released WHERE task_id IS NOT NULL GROUP BY task_id
), moved AS (
    UPDATE {task} AS task
    SET waits_for = GREATEST(0, task.waits_for - child.done),
        status = CASE WHEN child.has_failed THEN 'CANCELLED'
                      WHEN task.waits_for > child.done THEN 'BLOCKED'
                      WHEN task.run_after > clock_timestamp() THEN 'SCHEDULED'
                      WHEN task.lock_key IS NOT NULL THEN 'BLOCKED'
                      ELSE 'READY' END,
        worker = CASE WHEN task.waits_for > child.done THEN task.worker END,
        finished_at = CASE WHEN child.has_failed THEN clock_timestamp() END,
        expires_at = CASE WHEN child.has_failed THEN {expires_at} END
    FROM child
    WHERE task.id = child.id AND task.id = ANY (ARRAY(SELECT id FROM locked))
      AND task.status || '' = 'BLOCKED' AND task.waits_for > 0
    RETURNING task.id, task.status, task.queue, task.lock_key, task.attempts - task.uncounted AS number, task.waits_for,
              child.failed
), recorded AS (
    INSERT INTO {attempt} AS earlier
        (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback, cause)
    SELECT id, number, NULL, clock_timestamp(), clock_timestamp(), 'FAILED', %s, format(%s, failed), failed
    FROM moved WHERE status = 'CANCELLED'
    -- If it was retried and is cancelled again. A failed attempt of the function stays.
    ON CONFLICT (task_id, number) DO UPDATE
    SET finished_at = EXCLUDED.finished_at, traceback = EXCLUDED.traceback, cause = EXCLUDED.cause
    WHERE earlier.exception_path = EXCLUDED.exception_path
), notified AS MATERIALIZED (
    SELECT count(pg_notify(%s, awaited::text)) FROM (SELECT DISTINCT awaited FROM gone WHERE task_id IS NULL) AS ended
)
SELECT moved.id, moved.status, moved.queue, moved.lock_key, moved.waits_for, (SELECT count(*) FROM released)
FROM notified LEFT JOIN moved ON true
"""
LIMIT_RELEASE = ("SET LOCAL lock_timeout = '100ms'",)
RELEASE_UNLOCKED = RELEASE.replace("OF task\n", "OF task SKIP LOCKED\n")

# The next waiters in the order of their ids, each with the task that it waits for if that task has ended or no longer
# exists. After a crash, such a waiter may not have been released. Those of ``after_ended=`` whose waiting task has
# ended as well are deleted. A failed one may be retried, and then reads again what it has waited for.
ORPHANED_WAITERS = """
WITH page AS MATERIALIZED (
    SELECT id, awaited, task_id, has_ended FROM {waiter} WHERE id > %s ORDER BY id LIMIT %s
), over AS MATERIALIZED (
    SELECT id FROM page WHERE has_ended AND (
        SELECT task.finished_at IS NULL OR task.status = 'FAILED' FROM {task} AS task
        WHERE task.id = page.task_id LIMIT 1) IS NOT TRUE
), gone AS (
    DELETE FROM {waiter} WHERE id = ANY (ARRAY(
        SELECT id FROM {waiter} WHERE id = ANY (ARRAY(SELECT id FROM over)) FOR UPDATE SKIP LOCKED))
)
SELECT page.id, CASE WHEN page.has_ended IS NOT TRUE AND (task.id IS NULL OR task.finished_at IS NOT NULL)
                     THEN page.awaited END
FROM page LEFT JOIN LATERAL (
    SELECT task.id, task.finished_at FROM {task} AS task WHERE task.id = page.awaited LIMIT 1) AS task ON true
ORDER BY page.id
"""


def release(using: str, awaited: Iterable[int]) -> int:
    """Release the waiters of those of these tasks that have ended. Returns how many waiting tasks were changed.

    A waiting task leaves BLOCKED when the last task that it waits for has ended. It is cancelled if one of its
    ``after=`` did not succeed, and so are the tasks that wait for it. If another transaction has locked the waiting
    task, upkeep releases it later.
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
    """Release the waiters of these tasks after the commit of the current transaction."""
    if awaited:
        after_commit(using, release, using, awaited)


def release_ended_on_commit(using: str, awaited: Collection[int]) -> None:
    """Release the waiters of those of these tasks that have ended, after the commit of the current transaction.

    Only few have ended, and a query for the ended ones costs less than the release.
    """
    after_commit(using, _release_ended, using, awaited)


def orphaned_waiters(using: str, after: int, *, limit: int = WAITERS_AT_ONCE) -> list[tuple[int, int | None]]:
    """Return the ids of the next waiters behind the id ``after``, and delete those of ``after_ended=`` that are over.

    Each comes with the id of the awaited task if that task has ended or is deleted, otherwise with None.
    """
    return run(using, ORPHANED_WAITERS, after, limit)


def _release_ended(using: str, awaited: Collection[int]) -> None:
    release(using, [id_ for id_, _ in ended(using, list(awaited))])


def _awaited(using: str, ids: set[int]) -> set[int]:
    most = 2 * len(ids)
    found = run(using, AWAITED_BETWEEN, min(ids), max(ids), most, prepared=True)
    if len(found) == most:
        found = run(using, AWAITED, array_of_numbers(ids))
    return ids & {id_ for (id_,) in found}


def _release(using: str, ids: list[int]) -> tuple[list[tuple[int, str, str, str | None, int]], int]:
    """Release some waiters. Return the waiting tasks that were changed, and how many waiters were released."""
    values = (array_of_numbers(ids), RELEASED_AT_ONCE, DEPENDENCY_FAILED, DEPENDENCY_TEXT, DONE_CHANNEL)
    # As a message, which is READ COMMITTED. At REPEATABLE READ, a wait for a row that changes ends with an error.
    # It need not wait for the disk: if the server crashes, the upkeep releases the waiters again.
    first = [*unsynced(using), *LIMIT_RELEASE]
    try:
        rows = run(using, RELEASE, *values, first=first)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        # Another open transaction has locked one of the waiting tasks. It must not delay the others.
        rows = run(using, RELEASE_UNLOCKED, *values, first=first)
    [released] = {row[-1] for row in rows}
    moved = [row[:-1] for row in rows if row[0] is not None]
    wake(using, (queue for _, status, queue, *_ in moved if status == TaskStatus.READY))
    if any(status == TaskStatus.SCHEDULED for _, status, *_ in moved):
        wake_parents(using)
    # A cancelled task no longer blocks other tasks of its key, even if it still waited for other tasks.
    admit(using, (key for _, status, _, key, waits_for in moved if waits_for == 0 or status == TaskStatus.CANCELLED))
    return moved, released


# Tasks that run after others (``after=``, ``after_ended=``) wait for them again when they are retried.


#: The number of retried tasks that one statement blocks again. The planner may compare each pair of them.
BLOCKED_AT_ONCE = 200

# Which of these tasks were enqueued to run after others.
HAVE_DEPENDENCIES = "SELECT id FROM {task} WHERE id = ANY (%s::bigint[]) AND meta ?| '{{after,after_ended}}'"

# Makes retried tasks wait again for the tasks of their ``after=`` that have not succeeded, and for all those of their
# ``after_ended=``. ``RELEASE`` runs after the commit and treats those that have ended as it does for new tasks. A
# retried task does not wait for a task that no longer exists, because that task was pruned, so it ended long ago. If a
# task was cancelled while it waited, its waiter rows still exist and would count twice. So they are deleted first. IN
# within an expression uses a hash table. A join may compare each pair.
WAIT_AGAIN = """
WITH named AS MATERIALIZED (
    SELECT task.id AS task_id, each.id::bigint AS awaited, kind.option = 'after_ended' AS is_any_end
    FROM {task} AS task CROSS JOIN (VALUES ('after'), ('after_ended')) AS kind (option) CROSS JOIN LATERAL
        jsonb_array_elements_text(CASE WHEN jsonb_typeof(task.meta -> option) = 'array' THEN task.meta -> option END)
        AS each (id)
    WHERE task.id = ANY (%s::bigint[])
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT awaited FROM named))
      AND (task.status || '' <> 'SUCCESSFUL' OR task.id = ANY (ARRAY(SELECT awaited FROM named WHERE is_any_end)))
    ORDER BY task.id FOR KEY SHARE
), waits AS MATERIALIZED (
    SELECT task_id, awaited, is_any_end FROM named WHERE (awaited IN (SELECT id FROM locked)) IS TRUE
), gone AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT task_id FROM named))
), new AS (
    INSERT INTO {waiter} (task_id, awaited, has_ended)
    SELECT task_id, awaited, CASE WHEN is_any_end THEN false END FROM waits
), blocked AS (
    UPDATE {task} AS task SET status = 'BLOCKED', waits_for = counted.waits
    FROM (SELECT task_id, count(*)::int AS waits FROM waits GROUP BY task_id) AS counted
    WHERE task.id = counted.task_id AND task.id = ANY (ARRAY(SELECT task_id FROM waits))
)
SELECT DISTINCT awaited FROM waits
"""


def wait_again(using: str, ids: Sequence[int]) -> None:
    """Block each of these retried tasks until its ``after=`` have succeeded, and its ``after_ended=`` have ended.

    Call it in the transaction that retries them. If a task of its ``after=`` has failed and is not retried as well, the
    retried task is cancelled again after the commit.
    """
    waiting = [id_ for (id_,) in run(using, HAVE_DEPENDENCIES, array_of_numbers(ids))] if ids else []
    for some in windows(waiting, BLOCKED_AT_ONCE):
        release_on_commit(using, [awaited for (awaited,) in run(using, WAIT_AGAIN, array_of_numbers(some))])


# Scheduled tasks become ready when they are due.


# Tries to take the lock of a promotion, and limits how long the session may be idle in the transaction, so a process
# that freezes blocks the promotions of others for a moment only. Both end with the transaction, so they work behind a
# pooler as well.
TRY_UPKEEP_LOCK = f"""
SELECT pg_try_advisory_xact_lock({UPKEEP}, 0), set_config('idle_in_transaction_session_timeout', '3s', true), {BY_INDEX}
"""


def promote(using: str, *, limit: int = 1000) -> int:
    """Make up to ``limit`` due tasks READY or BLOCKED. Returns how many: none while another session does this.

    Two sessions would skip each other's rows, and the younger of two tasks of a lock key could be admitted first.
    """
    with transaction.atomic(using=using):
        if not run(using, TRY_UPKEEP_LOCK)[0][0]:
            return 0
        selection = first_free(due(rows_of("Task", using)), limit, no_key=True)
        promoted = mark(selection, {"status": DUE_STATUS}, "queue", "lock_key")
        wake(using, (queue for queue, key in promoted if key is None))
        admit_on_commit(using, {key for _, key in promoted})
        return len(promoted)


def restart_delays(using: str, *, limit: int = 10_000) -> int:
    """Restart the delays of retries and snoozes that were written before the server's clock was put back.

    Their last attempt is in the future, so without this they would wait for the whole step. Returns how many.
    """
    ahead = rows_of("Task", using).filter(
        status=TaskStatus.SCHEDULED, last_attempted_at__gt=Now(), run_after__gt=F("last_attempted_at")
    )
    delay = F("run_after") - F("last_attempted_at")
    changes = {"run_after": Now() + delay, "last_attempted_at": Now()}
    return len(mark(first_free(ahead.order_by("run_after", "id"), limit, no_key=True), changes, "id"))
