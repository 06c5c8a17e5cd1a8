"""Requests to a worker about a task that it runs: to cancel the task (cancel.py), or to return its stack.

They go through the row of the task, because the worker may run on another host. The column ``stack`` has the request
with the number of the attempt, and later the answer as well. So no later attempt answers it.
"""

from __future__ import annotations

import time
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from django_pglock.store.after_commit import notify_after_commit
from django_pglock.store.cancel import NOTIFY_REQUEST
from django_pglock.store.statements import run, run_by_index
from django_pglock.store.wake import REQUEST_CHANNEL

#: Seconds between two polls for an answer.
CHECK_INTERVAL = 0.05

# Each worker with tasks sends this once in a heartbeat interval.
REQUESTS = """
SELECT id, attempts, cancel_requested_at IS NOT NULL,
       COALESCE(NOT stack ? 'answered_at' AND stack -> 'attempt' = to_jsonb(attempts), false)
FROM {task}
WHERE status = 'RUNNING' AND worker BETWEEN %s AND %s
  AND (cancel_requested_at IS NOT NULL OR NOT stack ? 'answered_at' AND stack -> 'attempt' = to_jsonb(attempts))
ORDER BY worker
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
"""

STACK = """
SELECT (stack ->> 'attempt')::int, (stack ->> 'asked_at')::timestamptz, (stack ->> 'answered_at')::timestamptz,
       stack ->> 'text'
FROM {task} WHERE id = %s AND stack IS NOT NULL
"""


class Requests(NamedTuple):
    """Claims, as task id and attempt number: those to cancel, and those whose stack is requested."""

    cancels: list[tuple[int, int]]
    stacks: list[tuple[int, int]]


class Stack(NamedTuple):
    """A request for the stack of a task, and the answer of its worker. An empty text: no thread runs the function."""

    attempt: int
    asked_at: datetime
    answered_at: datetime | None
    text: str | None


def requests_to(using: str, worker: UUID) -> Requests:
    """Return the requests to ``worker``."""
    found = run_by_index(using, REQUESTS, worker, worker)
    cancels = [(id_, attempt) for id_, attempt, is_cancel, _ in found if is_cancel]
    return Requests(cancels, [(id_, attempt) for id_, attempt, _, is_for_stack in found if is_for_stack])


def request_stack(using: str, task: int) -> bool:
    """Request the stack of a running task. Returns False if the task does not run.

    The worker gets the request after the commit. A worker that listens for notifications answers at once, another one
    within a heartbeat interval.
    """
    if not run(using, REQUEST_STACK, task):
        return False
    notify_after_commit(using, NOTIFY_REQUEST, REQUEST_CHANNEL, [task])
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
