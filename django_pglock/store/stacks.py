"""The stack of a running task: a person asks, the worker that runs the task answers, both through one row.

The request names the attempt and the worker that it has found, so no other worker and no later attempt answers it. The
row is the only way: the worker may run on another host. A worker of an older version never looks at it.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from django_pglock.store.after_commit import after_commit
from django_pglock.store.cancel import NOTIFY_CANCEL
from django_pglock.store.sql import rows_of, run
from django_pglock.store.wake import CANCEL_CHANNEL

#: Seconds after which the next request, for whatever task, deletes a stack.
KEPT = 600.0
#: Seconds between two polls for an answer.
CHECK_INTERVAL = 0.05

# A new request for the same task takes the place of the one before, and old ones go.
ASK_STACK = """
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
    """Ask the worker of a running task for its stack, once this is committed. Returns False if the task does not run.

    A worker that listens answers at once, another one within a heartbeat interval.
    """
    if not run(using, ASK_STACK, task, KEPT, task):
        return False
    after_commit(using, run, using, NOTIFY_CANCEL, CANCEL_CHANNEL, [task])
    return True


def answer_stack(using: str, task: int, attempt: int, worker: UUID, stack: str) -> None:
    """Write the answer of a worker. An empty text says that no thread runs the function (yet, or any more)."""
    run(using, ANSWER_STACK, stack, task, attempt, worker)


def stack_of(using: str, task: int) -> Any:
    """Return the latest request for the stack of a task, with the answer if there is one; None without a request."""
    return rows_of("RunningStack", using).filter(pk=task).first()


def wait_for_stack(using: str, task: int, *, timeout: float) -> Any:
    """Return what ``stack_of`` returns, after up to ``timeout`` seconds of waiting for the answer.

    Inside of a transaction that is not READ COMMITTED the answer cannot be seen.
    """
    end = time.monotonic() + timeout
    while True:
        found = stack_of(using, task)
        if found is None or found.answered_at is not None or time.monotonic() >= end:
            return found
        time.sleep(CHECK_INTERVAL)
