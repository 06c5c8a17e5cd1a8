"""Tasks that run after others (``after=``): what they wait for when they are enqueued, and when they are retried."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import send
from django_pglock.store.call import Call, Enqueued
from django_pglock.store.insert_tasks import RETURNING, Row
from django_pglock.store.release import release_on_commit
from django_pglock.store.statements import array_of_numbers, filled, run

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: The number of retried tasks that one statement blocks again. The planner may compare each pair of them.
BLOCKED_AT_ONCE = 200

# Locks the tasks of ``after=``, because pruning skips locked rows. Before the commit of the new task, no other
# transaction can see that the new task waits for them. FOR KEY SHARE is the lock that a foreign key takes. It does not
# conflict with a claim or a settle, because those lock the row without its key. Pruning and deletion lock the key.
LOCK_AWAITED = "SELECT id FROM {task} WHERE id = ANY (%s::bigint[]) ORDER BY id FOR KEY SHARE"

# One call that runs after other tasks and is not unique. Returns nothing if one of the other tasks does not exist. The
# new task is always BLOCKED, whatever its other options are. ``RELEASE`` changes its status later.
ENQUEUE_AFTER = f"""
WITH awaited AS MATERIALIZED ({LOCK_AWAITED.replace("%s", "{awaited}")}), new AS (
    {{insert}} FROM awaited HAVING count(*) = {{number}}
    {RETURNING}
), waiters AS (
    INSERT INTO {{waiter}} (task_id, awaited) SELECT new.id, awaited.id FROM new, awaited
)
SELECT * FROM new
"""

# Which of these tasks were enqueued to run after others.
HAVE_DEPENDENCIES = "SELECT id FROM {task} WHERE id = ANY (%s::bigint[]) AND meta ? 'after'"

# Makes retried tasks wait again for the tasks of their ``after=`` that have not succeeded, also for those that have
# ended. ``RELEASE`` runs after the commit and treats those as it does for new tasks. A retried task does not wait for a
# task that no longer exists, because that task was pruned, so it ended long ago. If a task was cancelled while it
# waited, its waiter rows still exist and would count twice. So they are deleted first. IN within an expression uses a
# hash table. A join may compare each pair.
WAIT_AGAIN = """
WITH named AS MATERIALIZED (
    SELECT task.id AS task_id, after.id::bigint AS awaited FROM {task} AS task CROSS JOIN LATERAL
        jsonb_array_elements_text(CASE WHEN jsonb_typeof(task.meta -> 'after') = 'array' THEN task.meta -> 'after' END)
        AS after (id)
    WHERE task.id = ANY (%s::bigint[])
), locked AS MATERIALIZED (
    SELECT task.id FROM {task} AS task
    WHERE task.id = ANY (ARRAY(SELECT awaited FROM named)) AND task.status || '' <> 'SUCCESSFUL'
    ORDER BY task.id FOR KEY SHARE
), waits AS MATERIALIZED (
    SELECT task_id, awaited FROM named WHERE (awaited IN (SELECT id FROM locked)) IS TRUE
), gone AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT task_id FROM named))
), new AS (
    INSERT INTO {waiter} (task_id, awaited) SELECT task_id, awaited FROM waits
), blocked AS (
    UPDATE {task} AS task SET status = 'BLOCKED', waits_for = counted.waits
    FROM (SELECT task_id, count(*)::int AS waits FROM waits GROUP BY task_id) AS counted
    WHERE task.id = counted.task_id AND task.id = ANY (ARRAY(SELECT task_id FROM waits))
)
SELECT DISTINCT awaited FROM waits
"""


def lock_awaited(using: str, ids: Collection[int]) -> list[int]:
    """Lock these tasks against deletion until the end of the transaction. Return ids without a task."""
    known = {id_ for (id_,) in run(using, LOCK_AWAITED, array_of_numbers(ids))}
    return [each for each in ids if each not in known]


def insert_after(using: str, task: TaskFields, call: Call, meta: str) -> Enqueued | None:
    """Write one call that runs after other tasks. Return None if one of the other tasks does not exist."""
    row = send(connection_for(using), after_others(using, task, call, meta))
    return None if row is None else Enqueued(*row)


def after_others(using: str, task: TaskFields, call: Call, meta: str) -> str:
    """Return ``ENQUEUE_AFTER`` for a call."""
    connection = connection_for(using)
    connection.ensure_connection()
    row, awaited = Row(connection, task, call, meta), set(task.after)
    row.columns |= {"waits_for": str(len(awaited)), "status": "'BLOCKED'"}
    return ENQUEUE_AFTER.format(
        task=filled("{task}"),
        waiter=filled("{waiter}"),
        awaited=f"'{array_of_numbers(awaited)}'",
        insert=row.select,
        number=len(awaited),
    )


def wait_again(using: str, ids: Sequence[int]) -> None:
    """Block each of these retried tasks until all tasks of its ``after=`` have succeeded.

    Call it in the transaction that retries them. If a task of its ``after=`` has failed and is not retried as well, the
    retried task is cancelled again after the commit.
    """
    waiting = [id_ for (id_,) in run(using, HAVE_DEPENDENCIES, array_of_numbers(ids))] if ids else []
    for start in range(0, len(waiting), BLOCKED_AT_ONCE):
        some = array_of_numbers(waiting[start : start + BLOCKED_AT_ONCE])
        release_on_commit(using, [awaited for (awaited,) in run(using, WAIT_AGAIN, some)])
