"""Requests to a worker about the tasks that it runs: to cancel a task, or to return its stack."""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

from django.db import ProgrammingError
from psycopg.errors import InsufficientPrivilege

from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.statements import run_by_index

logger = get_logger(WORKER)

CANCEL_REQUESTS = """
SELECT id, attempts FROM {task}
WHERE status = 'RUNNING' AND worker BETWEEN %s AND %s AND cancel_requested_at IS NOT NULL
ORDER BY worker
"""

# One statement for both kinds, because each worker with tasks sends it once in a heartbeat interval. Requests for
# stacks are few, so they need no index.
REQUESTS = """
(
    SELECT id, attempts, false FROM {task}
    WHERE status = 'RUNNING' AND worker BETWEEN %s AND %s AND cancel_requested_at IS NOT NULL
    ORDER BY worker
)
UNION ALL
SELECT task, attempt, true FROM {running_stack} WHERE worker = %s AND answered_at IS NULL
"""

#: The databases in which our role has no right to read requests for stacks.
_forbidden: set[str] = set()


class Requests(NamedTuple):
    """Claims, as task id and attempt number: those to cancel, and those whose stack is requested."""

    cancels: list[tuple[int, int]]
    stacks: list[tuple[int, int]]


def requests_to(using: str, worker: UUID) -> Requests:
    """Return the requests to ``worker``.

    A role that was made for an earlier version has no right to the table of stacks. It still gets the cancel requests.
    """
    if using not in _forbidden:
        try:
            found = run_by_index(using, REQUESTS, worker, worker, worker)
        except ProgrammingError as error:
            if not isinstance(error.__cause__, InsufficientPrivilege):
                raise
            logger.warning("This worker cannot answer requests for the stacks of its tasks: %s", one_line(error))
            _forbidden.add(using)
        else:
            cancels = [(id_, attempt) for id_, attempt, is_for_stack in found if not is_for_stack]
            return Requests(cancels, [(id_, attempt) for id_, attempt, is_for_stack in found if is_for_stack])
    return Requests(run_by_index(using, CANCEL_REQUESTS, worker, worker), [])
