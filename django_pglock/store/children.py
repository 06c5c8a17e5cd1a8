"""The children of a task: ``context.gather()`` enqueues them, and the task continues when all of them have ended.

One transaction writes the children and suspends their parent, so that either all of it exists or nothing. The parent
is BLOCKED and waits for them as for the tasks of ``after_ended=``. Until then it keeps its worker. This tells it from
a task that has not begun, which does not keep its lock key.

A child may run again after the gather has ended, if a person retries it. So the end notes how the unsuccessful
children have ended. A successful one does not change any more. Pruning keeps them until the parent has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from django.db import transaction

from django_pglock.errors import ClaimLost, StepError, TaskCancelled, TaskError
from django_pglock.postgres.connections import connection_for, has_manual_transaction
from django_pglock.store.enqueue import enqueue_many
from django_pglock.store.insert_tasks import Call, Enqueued, batches, meta_of
from django_pglock.store.release import release_ended_on_commit
from django_pglock.store.requests_to_worker import write_progress
from django_pglock.store.statements import IN_INDEX_ORDER, array_of_numbers, rows_of, run
from django_pglock.tasks.call_keys import RATED
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.instrumentation import observe_enqueue
from django_pglock.tasks.states import TaskStatus
from django_pglock.tasks.step_records import Suspension

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

# Suspends the parent, records the gather and writes its waiters, all or none. The record is there already if a child
# was retried before the parent has seen its end. Waiters are there already if the parent was cancelled and retried.
SUSPEND_PARENT = """
WITH parent AS MATERIALIZED (
    UPDATE {task} AS task
    SET status = 'BLOCKED', waits_for = %s, uncounted = LEAST(task.uncounted, task.attempts - 1) + 1,
        retries = 0, rescues = 0
    WHERE task.id = %s AND task.attempts = %s AND task.status = 'RUNNING' AND task.cancel_requested_at IS NULL
    RETURNING task.id, task.attempts
), before AS (
    DELETE FROM {waiter} WHERE task_id = ANY (ARRAY(SELECT id FROM parent)) AND has_ended IS FALSE
), recorded AS (
    INSERT INTO {step} (task_id, name, number, kind, result, attempt, started_at)
    SELECT id, %s, %s, 'CHILDREN', %s::jsonb, attempts, clock_timestamp() FROM parent
    ON CONFLICT DO NOTHING
), waiters AS (
    INSERT INTO {waiter} (task_id, awaited, has_ended)
    SELECT parent.id, child.id, false FROM parent, unnest(%s::bigint[]) AS child (id)
)
SELECT id FROM parent
"""

# The task, and the tasks that gather it, directly or through others: with the lock keys that they keep meanwhile.
ABOVE = """
WITH RECURSIVE above (id) AS (
    SELECT %s::bigint
    UNION
    SELECT waiting.task_id FROM above CROSS JOIN LATERAL (
        SELECT waiter.task_id FROM {waiter} AS waiter
        WHERE waiter.awaited BETWEEN above.id AND above.id AND waiter.task_id IS NOT NULL AND waiter.has_ended IS FALSE
        ORDER BY waiter.awaited) AS waiting
)
SELECT task.id, task.lock_key, COALESCE(task.concurrency, 1) FROM {task} AS task
WHERE task.id = ANY (ARRAY(SELECT id FROM above)) AND task.status || '' IN ('RUNNING', 'BLOCKED')
  AND task.worker IS NOT NULL
"""

# Ends a gather if all of its children have ended, and notes how the unsuccessful ones have. Otherwise returns those
# that have not ended.
END_GATHER = """
WITH child AS MATERIALIZED (
    SELECT task.id, task.status, task.attempts - task.uncounted AS number, task.last_attempted_at, task.finished_at
    FROM {task} AS task
    WHERE task.id = ANY (ARRAY(
            SELECT each.id::bigint
            FROM {step} AS step, jsonb_array_elements_text(step.result -> 'children') AS each (id)
            WHERE step.task_id = %s AND step.name = %s))
      AND task.status || '' <> 'SUCCESSFUL'
), ended AS (
    UPDATE {step} AS step
    SET finished_at = clock_timestamp(), result = step.result || jsonb_build_object('ends', COALESCE((
        SELECT jsonb_object_agg(id, jsonb_build_array(status, number, date_part('epoch', last_attempted_at),
                                                      date_part('epoch', finished_at))) FROM child), '{{}}'))
    WHERE step.task_id = %s AND step.name = %s AND step.finished_at IS NULL
      AND (SELECT id FROM child WHERE finished_at IS NULL LIMIT 1) IS NULL
)
SELECT id FROM child WHERE finished_at IS NULL
"""

# The children of tasks that have been suspended by a gather, without those that others had enqueued before.
CHILDREN = """
SELECT child.id::bigint FROM {step} AS step, jsonb_array_elements_text(step.result -> 'children') AS child (id)
WHERE step.task_id = ANY (%s::bigint[]) AND step.kind = 'CHILDREN' AND step.finished_at IS NULL
  AND (step.result -> 'found' @> to_jsonb(child.id::bigint)) IS NOT TRUE
"""


def write_gather(using: str, claim: Claim, how: Suspension) -> None:
    """Enqueue the children of a running task, and suspend the task until they have ended.

    Raises ``ClaimLost`` and ``TaskCancelled`` if the task may not continue, ``StepError`` if it would wait for itself,
    and what ``enqueue()`` raises. Then nothing is written.
    """
    connection = connection_for(using)
    if is_open := has_manual_transaction(connection):
        # With AUTOCOMMIT off, or after a BEGIN of the function, which has not committed what is in it.
        connection.rollback()
    with transaction.atomic(using=using, durable=True):
        rows = _enqueue(using, claim, how) if how.calls else []
        found = {row.id for row in rows if not row.is_new}.union(how.awaited)
        record = {"children": [row.id for row in rows]} | ({"found": sorted(found)} if found else {})
        awaited = dict.fromkeys([*record["children"], *how.awaited])
        step = (how.name, how.number, json.dumps(record), array_of_numbers(awaited))
        if claim.progress is not claim.written_progress:
            write_progress(using, [claim], is_last=True)
        if not run(using, SUSPEND_PARENT, len(awaited), claim.id, claim.attempt, *step):
            raise _refusal(using, claim, how.name)
        if found:
            release_ended_on_commit(using, found)
    if is_open and not connection.autocommit:
        connection.commit()


def _enqueue(using: str, claim: Claim, how: Suspension) -> list[Enqueued]:
    """Write the calls of a gather, those of one function together. Return their rows in the order of the calls."""
    has_keys = any(task.unique is not None or _keeps(call.lock) for task, call in how.calls)
    above = run(using, ABOVE, claim.id, first=IN_INDEX_ORDER) if has_keys else []
    _refuse_kept_keys(how, above)
    places: dict[int, list[int]] = {}
    for place, (task, _call) in enumerate(how.calls):
        places.setdefault(id(task), []).append(place)
    rows: dict[int, Enqueued] = {}
    for alike in places.values():
        written = _write(using, how.calls[alike[0]][0], [how.calls[place][1] for place in alike])
        rows.update(zip(alike, written, strict=True))
    if circle := {id_ for id_, *_ in above}.intersection(row.id for row in rows.values()):
        raise StepError(
            f"The gather {how.name!r} has a call whose unique key is that of task {min(circle)}, which waits for this "
            "gather. So neither would ever continue. Give the call another key."
        )
    return [rows[place] for place in range(len(rows))]


def _write(using: str, task: TaskFields, calls: Sequence[Call]) -> list[Enqueued]:
    with observe_enqueue(task) as observed:
        meta = meta_of(task, observed.headers)
        # All calls of a unique task at once, so that all callers lock the keys in the same order.
        parts = [calls] if task.unique is not None else batches(calls)
        rows = [row for part in parts for row in enqueue_many(using, task, part, meta=meta)]
        observed.enqueued([str(row.id) for row in rows])
    return rows


def _keeps(key: str | None) -> bool:
    """Return whether a suspended task may keep this key. That of a rate alone is free while no task starts."""
    return key is not None and not key.startswith(RATED)


def _refuse_kept_keys(how: Suspension, above: Iterable[tuple[int, str | None, int]]) -> None:
    """Raise ``StepError`` for a call whose lock key a task keeps until this gather has ended."""
    kept = {key: (id_, concurrency) for id_, key, concurrency in above if _keeps(key)}
    for task, call in how.calls if kept else ():
        id_, concurrency = kept.get(call.lock, (None, 0))
        # Beside others, a suspended task does not count.
        if id_ is not None and (concurrency == 1 or (task.concurrency or 1) == 1):
            raise StepError(
                f"The gather {how.name!r} has a call of {task.module_path} with the lock key {call.lock!r}, which task "
                f"{id_} keeps until this gather has ended. So the call would never begin, and nothing is enqueued. "
                "Give the call another key, or call the function in a step."
            )


def _refusal(using: str, claim: Claim, name: str) -> TaskError:
    rows = rows_of("Task", using).filter(pk=claim.id, attempts=claim.attempt, status=TaskStatus.RUNNING)
    if rows.exists():
        return TaskCancelled()
    return ClaimLost(f"{claim} is no longer claimed by this attempt, so the children of {name!r} are not enqueued.")


def end_gather(using: str, task_id: int, name: str) -> list[int]:
    """End a gather if all of its children have ended. Return the ids of those that have not."""
    return [id_ for (id_,) in run(using, END_GATHER, task_id, name, task_id, name)]


def unfinished_gathers(using: str, parents: Iterable[int]) -> list[int]:
    """Return the children that these tasks have enqueued in gathers that have not ended."""
    return [id_ for (id_,) in run(using, CHILDREN, array_of_numbers(parents))]
