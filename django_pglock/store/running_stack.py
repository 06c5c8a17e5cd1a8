"""The stack of a running task: a person requests it, and the worker of the task writes the answer into the same row.

The request has the attempt and the worker of the task, so no other worker and no later attempt answers it. Request and
answer go through the database, because the worker may run on another host. A worker of an older version does not
answer.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from django_pglock.store.after_commit import notify_after_commit
from django_pglock.store.cancel import NOTIFY_REQUEST
from django_pglock.store.statements import rows_of, run
from django_pglock.store.wake import REQUEST_CHANNEL

#: Seconds after which a stack is deleted by the next request for any task.
KEPT_FOR = 600.0
#: Seconds between two polls for an answer.
CHECK_INTERVAL = 0.05

# A new request replaces an earlier request for the same task. Old requests are deleted.
REQUEST_STACK = """
WITH old AS (
    DELETE FROM {running_stack} WHERE task <> %s AND asked_at < clock_timestamp() - make_interval(secs => %s)
)
INSERT INTO {running_stack} (task, attempt, worker, asked_at, stack)
SELECT id, attempts, worker, clock_timestamp(), '' FROM {task} WHERE id = %s AND status || '' = 'RUNNING'
ON CONFLICT (task) DO UPDATE
SET attempt = EXCLUDED.attempt, worker = EXCLUDED.worker, asked_at = EXCLUDED.asked_at, answered_at = NULL, stack = ''
RETURNING task
"""

ANSWER_STACK = """
UPDATE {running_stack} SET stack = %s, answered_at = clock_timestamp()
WHERE task = %s AND attempt = %s AND worker = %s AND answered_at IS NULL
"""


def request_stack(using: str, task: int) -> bool:
    """Request the stack of a running task. Returns False if the task does not run.

    The worker gets the request after the commit. A worker that listens for notifications answers at once, another one
    within a heartbeat interval.
    """
    if not run(using, REQUEST_STACK, task, KEPT_FOR, task):
        return False
    notify_after_commit(using, NOTIFY_REQUEST, REQUEST_CHANNEL, [task])
    return True


def answer_stack(using: str, task: int, attempt: int, worker: UUID, stack: str) -> None:
    """Write the answer of a worker. An empty text means that no thread runs the function yet, or that it has ended."""
    run(using, ANSWER_STACK, stack, task, attempt, worker)


def stack_of(using: str, task: int) -> Any:
    """Return the row of the latest request for the stack of a task, which also has the answer. None: no request."""
    return rows_of("RunningStack", using).filter(pk=task).first()


def wait_for_stack(using: str, task: int, *, timeout: float) -> Any:
    """Wait up to ``timeout`` seconds for the answer. Return the same as ``stack_of``.

    Inside of a transaction that is not READ COMMITTED, the answer is not visible.
    """
    end = time.monotonic() + timeout
    while True:
        found = stack_of(using, task)
        if found is None or found.answered_at is not None or time.monotonic() >= end:
            return found
        time.sleep(CHECK_INTERVAL)
