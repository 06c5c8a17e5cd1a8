"""Stops the code of an attempt that must end, in its own thread: before and after each of its statements."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from psycopg import ServerCursor

from django_pglock.errors import TaskStopped

#: The attempt for which the code in this context runs; None outside of tasks. Its ``check()`` raises ``TaskStopped``.
#: ``sync_to_async()`` and ``asyncio.to_thread()`` copy the context, so their threads are stopped as well.
current_attempt: ContextVar[Any] = ContextVar("django_pglock_attempt", default=None)


def check() -> None:
    """Raise ``TaskStopped`` if the attempt of this context must end."""
    if (attempt := current_attempt.get()) is not None:
        attempt.check()


def install_wrapper(connection: Any, **kwargs: Any) -> None:
    """Install the execute wrapper, below all others, because Django takes the last one off at the end of a block."""
    if stopping_wrapper not in connection.execute_wrappers:
        connection.execute_wrappers.insert(0, stopping_wrapper)
    if "ensure_connection" not in vars(connection):
        connection.ensure_connection = partial(_ensure_connection, weakref.ref(connection))


def _ensure_connection(reference: weakref.ref[Any]) -> None:
    """Check also where no statement can be sent, because the session has ended, or was never opened."""
    connection: Any = reference()
    raw = connection.connection
    if raw is None or getattr(raw, "closed", False):
        check()
    type(connection).ensure_connection(connection)


def install_if_in_task(connection: Any, **kwargs: Any) -> None:
    """Install the execute wrapper of a connection that a task opens."""
    if current_attempt.get() is not None:
        install_wrapper(connection)


def stopping_wrapper(execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    """Execute a statement, unless the attempt must end. If it must end afterwards, that replaces any error."""
    if (attempt := current_attempt.get()) is None:
        return execute(sql, params, many, context)
    try:
        attempt.check()
        try:
            result = execute(sql, params, many, context)
        finally:
            attempt.check()
    except TaskStopped:
        if context["connection"].in_atomic_block:
            # Code that swallows the exception must not commit half of the block.
            context["connection"].needs_rollback = True
        raise
    cursor = context["cursor"]
    if isinstance(cursor.cursor, ServerCursor):
        # Each fetch is a statement, too, and Django calls no wrapper for it.
        cursor.fetchmany = partial(_fetch, cursor.fetchmany)
    return result


def _fetch(fetch: Callable[..., Any], *args: Any) -> Any:
    check()
    try:
        return fetch(*args)
    finally:
        check()
