"""What the rooms above need from a Django connection: is it PostgreSQL, in a transaction, alive; and a private one."""

from __future__ import annotations

import copy
import select
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.utils.module_loading import import_string

from django_pglock.errors import ConfigurationError

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

# RDHUP (Linux) tells of the peer's end also while its last message is still unread.
_HANG_UP = getattr(select, "POLLHUP", 0) | getattr(select, "POLLERR", 0) | getattr(select, "POLLRDHUP", 0)


def connection_for(using: str) -> DatabaseWrapper:
    """Return this thread's Django connection to the database alias ``using``.

    Raises ``ConfigurationError`` when the alias is not PostgreSQL through psycopg 3.
    """
    connection: Any = connections[using]
    if connection.vendor != "postgresql":
        raise ConfigurationError(
            f"Database {using!r} is {connection.vendor}; django_pglock needs PostgreSQL. "
            "Name another alias with using=, DJANGO_PGLOCK['USING'] or the OPTIONS of TASKS."
        )
    return connection  # type: ignore[no-any-return]


def in_atomic(connection: DatabaseWrapper) -> bool:
    """Say whether the caller is inside ``atomic()``.

    The block that ``TestCase`` itself opens does not count, as it does not for ``atomic(durable=True)``: code under
    test behaves as in production.
    """
    if not connection.in_atomic_block:
        return False
    blocks = getattr(connection, "atomic_blocks", [])
    return not (blocks and all(getattr(block, "_from_testcase", False) for block in blocks))


def dedicated_connection(using: str, *, application_name: str | None = None) -> DatabaseWrapper:
    """Return a new, unshared Django connection to ``using``, outside every pool and never recycled by age.

    For those who must keep a session: a listener, a heartbeat, a session lock. The owner closes it.
    ``application_name`` is what ``pg_stat_activity`` shows.
    """
    settings = copy.deepcopy(connection_for(using).settings_dict)
    options = settings["OPTIONS"]
    options.pop("pool", None)
    if application_name is not None:
        options["application_name"] = application_name[:63]
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, ATOMIC_REQUESTS=False)
    wrapper = import_string(f"{settings['ENGINE']}.base.DatabaseWrapper")
    connection: DatabaseWrapper = wrapper(settings, alias=using)
    connection.inc_thread_sharing()
    return connection


def has_hung_up(connection: DatabaseWrapper) -> bool:
    """Say whether the server has ended this session, without asking it.

    A server that shuts down, or a backend that was terminated, closes its end of the socket, which a look at the
    socket shows in microseconds, long before the next statement would fail. A connection that was never opened has
    not hung up; one that libpq or Django has given up has.
    """
    raw: Any = connection.connection
    return bool(connection.closed_in_transaction) if raw is None else has_ended(raw)


def has_ended(raw: Any) -> bool:
    """Say of a psycopg connection whether its session has ended, without asking the server."""
    if raw.closed or raw.broken:
        return True
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(raw.fileno(), _HANG_UP)
    return any(event & _HANG_UP for _, event in poll.poll(0))


def backend_pid(connection: DatabaseWrapper) -> int:
    """Return the server process id as libpq knows it, without asking the server."""
    connection.ensure_connection()
    return int(connection.connection.info.backend_pid)
