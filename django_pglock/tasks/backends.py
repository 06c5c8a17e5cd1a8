"""The backends of ``TASKS`` that belong to this package, the databases of their tasks, and many calls at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from django_pglock.errors import ConfigurationError, TaskArgumentsError
from django_pglock.tasks.arguments import with_article
from django_pglock.tasks.compat import InvalidTask, task_backends

_HINT = "In one entry of TASKS, set BACKEND to django_pglock.backend.PostgresBackend and OPTIONS to the database."


def our_backends(database: str | None = None) -> list[Any]:
    """Return the backends of ``TASKS`` that belong to this package, those of one database if it is given."""
    ours = [backend for backend in task_backends.all() if hasattr(backend, "database")]
    return [backend for backend in ours if database in (None, backend.database)]


def database_of_tasks(alias: str | None = None, *, option: str) -> str:
    """Return the database alias that a backend of ``TASKS`` uses or, without its alias, the one that all of them use.

    Raises ``ConfigurationError`` for a backend of others, and if the backends use no database or several. ``option`` is
    what the message recommends to choose one of several databases.
    """
    ours = {backend.alias: backend.database for backend in our_backends()}
    if alias is not None and alias not in ours:
        known = ", ".join(sorted(ours))
        raise ConfigurationError(f"TASKS has no backend {alias!r} of django_pglock. Its backends: {known}.")
    databases = sorted(set(ours.values()) if alias is None else {ours[alias]})
    if not databases:
        raise ConfigurationError(f"No backend in TASKS stores its tasks in PostgreSQL. {_HINT}")
    if len(databases) > 1:
        known = ", ".join(databases)
        raise ConfigurationError(f"The backends in TASKS use several databases: {known}. Choose one with {option}.")
    return str(databases[0])


def require_tasks(database: str) -> None:
    """Raise ``ConfigurationError`` for a database without tasks.

    A worker would find none there, and with ``drain`` it would end as if all were done.
    """
    if not our_backends(database):
        raise ConfigurationError(f"No backend in TASKS stores its tasks in the database {database!r}. {_HINT}")


@async_unsafe("enqueue_many() blocks the event loop here. Write: await aenqueue_many(…)")
def enqueue_many(task: Any, calls: Iterable[Any]) -> list[str]:
    """Enqueue many calls of one function: ``enqueue_many(send.using(priority=5), [{"order_id": 1}, ...])``.

    Each of ``calls`` is a mapping (keyword arguments), a tuple (positional arguments), or any other value (the only
    argument). The calls are written in batches, in one transaction or in the caller's, so either all are written or
    none. They are claimed in their order. ``calls`` may be a generator: only one batch and the ids are in memory at a
    time. For a unique task, all calls are in memory, because their keys are taken in another order.

    Returns the ids, in order, for ``get_result``. The signal ``task_enqueued`` is not sent. Raises
    ``TaskArgumentsError`` for arguments that are not JSON and for a single call instead of a list, and ``InvalidTask``.
    Then nothing is written.
    """
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Iterable):
        raise TaskArgumentsError(
            f"enqueue_many was given {with_article(type(calls).__name__)}; give a list or a generator with one item "
            "for each call."
        )
    if not hasattr(task, "get_backend"):
        raise InvalidTask(f"enqueue_many was given {task!r}, which is not a task. Decorate the function with @task.")
    backend = task.get_backend()
    if hasattr(backend, "enqueue_many"):
        ids: list[str] = backend.enqueue_many(task, calls)
        return ids
    # Django's own backends for tests and development.
    return [task.enqueue(*args, **kwargs).id for args, kwargs in map(arguments_of, calls)]


async def aenqueue_many(task: Any, calls: Iterable[Any]) -> list[str]:
    """Do the same as ``enqueue_many``, without blocking the event loop."""
    return await sync_to_async(enqueue_many)(task, calls)


def arguments_of(call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments of one of ``calls``."""
    if isinstance(call, dict):
        return (), call
    return (call if isinstance(call, tuple) else (call,)), {}
