"""Waiting for a task's end without polling: the process leaves a note in the table of waiters and listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.apps import apps

from django_pglock.conf import get_settings
from django_pglock.errors import TaskError
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.tasks.waiting import DONE_CHANNEL

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: Seconds of one wait for a notification; between two of them a wait can be called off.
SLICE = 0.5


def await_end(task_id: str, using: str, timeout: float | None, *, is_wanted: Callable[[], bool]) -> bool:
    """Wait until a task is finished, on a session of its own; say whether that came within ``timeout`` seconds.

    Behind a pooler no notification arrives; then it looks every ``POLL_INTERVAL`` seconds. Raises ``TaskError`` inside
    a transaction, which nobody else sees: the task would wait for the caller.
    """
    if in_transaction(connection_for(using)):
        raise TaskError("wait() inside atomic() would wait for ever: no worker sees the task before the commit.")
    deadline = None if timeout is None else time.monotonic() + timeout
    with _listening(task_id, using) as connection:
        looked_at = 0.0
        while not _is_over(deadline) and is_wanted():
            if time.monotonic() - looked_at >= get_settings().POLL_INTERVAL or looked_at == 0.0:
                looked_at = time.monotonic()
                if _is_finished(connection, task_id):
                    return True
            if _is_told(connection, task_id, _slice(deadline)):
                looked_at = 0.0
        return False


@contextmanager
def _listening(task_id: str, using: str) -> Iterator[DatabaseWrapper]:
    connection = dedicated_connection(using, application_name="django_pglock wait")
    table = connection.ops.quote_name(apps.get_model("django_pglock", "Waiter")._meta.db_table)
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {DONE_CHANNEL}")
            cursor.execute(f"INSERT INTO {table} (awaited) VALUES (%s) RETURNING id", (int(task_id),))
            [waiter] = cursor.fetchone()
        yield connection
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table} WHERE id = %s", (waiter,))
    finally:
        connection.close()


def _is_finished(connection: DatabaseWrapper, task_id: str) -> bool:
    table = connection.ops.quote_name(apps.get_model("django_pglock", "Task")._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT finished_at IS NOT NULL FROM {table} WHERE id = %s", (int(task_id),))
        row = cursor.fetchone()
    # A row that is gone was finished, or nobody wants it any more.
    return row is None or bool(row[0])


def _is_told(connection: DatabaseWrapper, task_id: str, seconds: float) -> bool:
    raw: Any = connection.connection
    return any(note.payload == task_id for note in raw.notifies(timeout=seconds, stop_after=1))


def _is_over(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def _slice(deadline: float | None) -> float:
    return SLICE if deadline is None else max(0.0, min(SLICE, deadline - time.monotonic()))
