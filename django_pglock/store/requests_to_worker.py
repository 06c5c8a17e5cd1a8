"""Requests to a worker about a task that it runs: to cancel the task (operate.py), or to return its stack.

They go through the row of the task, because the worker may run on another host. The column ``stack`` has the request
with the number of the attempt, and later the answer as well. So no later attempt answers it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple
from uuid import UUID

from django_pglock.store.statements import run, windows
from django_pglock.store.wake import notify_after_commit
from django_pglock.tasks.claim import Claim

#: Seconds between two polls for an answer.
CHECK_INTERVAL = 0.05

# Notifies the parents of the workers that run these tasks (``store/wake.py`` has the channel).
NOTIFY_REQUEST = """
SELECT pg_notify('pglock_' || replace(parent::text, '-', ''), id::text) FROM {worker}
WHERE id IN (SELECT worker FROM {task} WHERE id = ANY (%s::bigint[]))
"""

# Each parent sends this for its workers with tasks once in a heartbeat interval.
REQUESTS = """
SELECT found.* FROM unnest(%s::uuid[]) AS mine (worker) CROSS JOIN LATERAL (
    SELECT worker, id, attempts, cancel_requested_at IS NOT NULL,
           COALESCE(NOT stack ? 'answered_at' AND stack -> 'attempt' = to_jsonb(attempts), false)
    FROM {task} AS task
    WHERE status = 'RUNNING' AND task.worker BETWEEN mine.worker AND mine.worker
      AND (cancel_requested_at IS NOT NULL OR NOT stack ? 'answered_at' AND stack -> 'attempt' = to_jsonb(attempts))
    ORDER BY task.worker) AS found
"""

# A new request replaces the earlier one with its answer. No index has the column, so these are HOT updates.
REQUEST_STACK = """
UPDATE {task} SET stack = jsonb_build_object('attempt', attempts, 'asked_at', clock_timestamp())
WHERE id = %s AND status || '' = 'RUNNING' RETURNING id
"""

# A locked row is skipped: its worker has to pass on other requests, and finds this one again.
ANSWER_STACK = """
UPDATE {task} SET stack = stack || jsonb_build_object('answered_at', clock_timestamp(), 'text', %s::text)
WHERE id = (
    SELECT id FROM {task}
    WHERE id = %s AND attempts = %s AND worker = %s
      AND NOT stack ? 'answered_at' AND stack -> 'attempt' = to_jsonb(attempts)
    FOR NO KEY UPDATE SKIP LOCKED)
RETURNING id
"""

STACK = """
SELECT (stack ->> 'attempt')::int, (stack ->> 'asked_at')::timestamptz, (stack ->> 'answered_at')::timestamptz,
       stack ->> 'text'
FROM {task} WHERE id = %s AND stack IS NOT NULL
"""


class Stack(NamedTuple):
    """A request for the stack of a task, and the answer of its worker. An empty text: no thread runs the function."""

    attempt: int
    asked_at: datetime
    answered_at: datetime | None
    text: str | None


def request_stack(using: str, task: int) -> bool:
    """Request the stack of a running task. Returns False if the task does not run.

    The worker gets the request after the commit. A worker that listens for notifications answers at once, another one
    within a heartbeat interval.
    """
    if not run(using, REQUEST_STACK, task):
        return False
    notify_after_commit(using, NOTIFY_REQUEST, [task])
    return True


def answer_stack(using: str, task: int, attempt: int, worker: UUID, stack: str) -> None:
    """Write the answer of a worker. An empty text means that no thread runs the function yet, or that it has ended."""
    run(using, ANSWER_STACK, stack, task, attempt, worker)


def wait_for_stack(using: str, task: int, *, timeout: float) -> Stack | None:
    """Wait up to ``timeout`` seconds for the answer. Return the latest request for it; None: there is none.

    Inside of a transaction that is not READ COMMITTED, the answer is not visible.
    """
    end = time.monotonic() + timeout
    while True:
        found = next((Stack(*row) for row in run(using, STACK, task)), None)
        if found is None or found.answered_at is not None or time.monotonic() >= end:
            return found
        time.sleep(CHECK_INTERVAL)


# Writes what running tasks report: their progress, and the log records of successful attempts (``capture_logs``).
#
# The log records of other outcomes are written with the outcome. The statement for successes is the most frequent of
# all, so it has no column for log records.


#: The number of rows that one statement selects by an array and joins. The planner may compare each pair.
COMPARED_AT_ONCE = 200

# Writes what tasks have reported, guarded by their claims. No index has these columns, so these are HOT updates. Locked
# rows are skipped, because the caller must not wait: it has requests to pass on, or other tasks to settle.
_WRITE = """
WITH reported AS MATERIALIZED (
    SELECT * FROM unnest(%s::bigint[], %s::int[], %s::{type}[]) AS reported (id, attempt, value)
), free AS MATERIALIZED (
    SELECT task.id, reported.value FROM {{task}} AS task JOIN reported ON reported.id = task.id
    WHERE task.id = ANY (ARRAY(SELECT id FROM reported)) AND task.attempts = reported.attempt{condition}
    FOR NO KEY UPDATE OF task SKIP LOCKED
)
UPDATE {{task}} AS task SET {change}
FROM free WHERE task.id = free.id AND task.id = ANY (ARRAY(SELECT id FROM free)) RETURNING task.id
"""
WRITE_PROGRESS = _WRITE.format(
    type="jsonb", change="progress = free.value", condition=" AND task.status || '' = 'RUNNING'"
)
# The last progress of a task, in the task's own transaction, right before its end. It waits for locked rows, as the
# statement that ends the task does.
WRITE_LAST_PROGRESS = WRITE_PROGRESS.replace(" SKIP LOCKED", "")
# Also written if an attempt has logged nothing. Otherwise the log of the previous attempt would stay. The status is not
# compared, because an atomic task has already ended.
WRITE_LOGS = _WRITE.format(type="text", change="log = NULLIF(free.value, '')", condition="")


def write_progress(using: str, claims: Sequence[Claim], *, is_last: bool = False) -> None:
    """Write the progress that these running tasks have reported, except for claims that were lost.

    Locked rows are skipped as well, unless the progress ``is_last``.
    """
    for some in windows(sorted(claims, key=attrgetter("id")), COMPARED_AT_ONCE):
        _write(using, some, is_last=is_last)


def _write(using: str, claims: Sequence[Claim], *, is_last: bool) -> None:
    # Read once, because the functions may report more at this moment.
    reported = [claim.progress for claim in claims]
    statement = WRITE_LAST_PROGRESS if is_last else WRITE_PROGRESS
    written = run(using, statement, [claim.id for claim in claims], [claim.attempt for claim in claims], reported)
    for claim, progress in zip(claims, reported, strict=True):
        if (claim.id,) in written:
            claim.written_progress = progress


def write_logs(using: str, claims: Sequence[Claim]) -> None:
    """Write the log records of these claims into the rows of their tasks, except for claims that were lost."""
    run(
        using,
        WRITE_LOGS,
        [each.id for each in claims],
        [each.attempt for each in claims],
        [each.log for each in claims],
    )
