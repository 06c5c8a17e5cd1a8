"""Tasks that run after others (``after=``) wait for them again when they are retried."""

from __future__ import annotations

from collections.abc import Sequence

from django_pglock.store.release import release_on_commit
from django_pglock.store.statements import array_of_numbers, run

#: The number of retried tasks that one statement blocks again. The planner may compare each pair of them.
BLOCKED_AT_ONCE = 200

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


def wait_again(using: str, ids: Sequence[int]) -> None:
    """Block each of these retried tasks until all tasks of its ``after=`` have succeeded.

    Call it in the transaction that retries them. If a task of its ``after=`` has failed and is not retried as well, the
    retried task is cancelled again after the commit.
    """
    waiting = [id_ for (id_,) in run(using, HAVE_DEPENDENCIES, array_of_numbers(ids))] if ids else []
    for start in range(0, len(waiting), BLOCKED_AT_ONCE):
        some = array_of_numbers(waiting[start : start + BLOCKED_AT_ONCE])
        release_on_commit(using, [awaited for (awaited,) in run(using, WAIT_AGAIN, some)])
