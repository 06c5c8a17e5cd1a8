"""Writes a call with a lock key and admits it to this key, in a transaction of our own. For a rate: rate.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import send
from django_pglock.store.admit import ADMITTED, LOCK_KEY
from django_pglock.store.call import Call, Enqueued, is_alone
from django_pglock.store.insert_tasks import ENQUEUE_ONE, values_of_one
from django_pglock.store.statements import message
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

# Does the same as ``ENQUEUE_ONE``, right after ``LOCK_KEY`` in the same message, which is a transaction. So a task that
# is the only one of its key needs no second transaction for its admission. Also returns the status of another task of
# the key. If one is admitted, the status is that of an admitted one, because BLOCKED is the first status in the order.
# This is not for unique tasks: the INSERT may wait for another transaction, and all other tasks of the key would wait,
# too.
ENQUEUE_AT_KEY = f"""
WITH other AS MATERIALIZED (
    SELECT task.status FROM {{task}} AS task
    WHERE task.lock_key BETWEEN %s AND %s AND task.lock_key IS NOT NULL AND task.finished_at IS NULL
    ORDER BY task.lock_key DESC, task.status DESC, task.id DESC LIMIT 1
)
{ENQUEUE_ONE.strip().replace("moment.lock_key IS NOT NULL", "EXISTS (SELECT FROM other)")},
    (SELECT status FROM other)
"""


def insert_at_key(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, bool]:
    """Write one call with a lock key.

    Also returns whether the call waits for another task whose end admits to the key. Then nothing else has to be done.
    """
    key = call.lock
    enqueued, other = insert_by(using, key, ENQUEUE_AT_KEY, (key, key, *values_of_one(task, call, meta)))
    return enqueued, enqueued.status == TaskStatus.BLOCKED and is_alone(task) and other in ADMITTED


def insert_by(using: str, key: str | None, statement: str, values: Sequence[Any]) -> tuple[Enqueued, Any]:
    """Write one call while no other transaction admits to its key. Also return the statement's answer about the key."""
    connection = connection_for(using)
    connection.ensure_connection()
    *row, said = send(connection, message(using, (LOCK_KEY, [key]), (statement, values))) or ()
    return Enqueued(*row), said
