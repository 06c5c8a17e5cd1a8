"""A registry of the Django connections of all threads of this process.

Django stores the connections of a thread in a thread-local object. But a worker has to watch the connections of its
task threads, so they are registered here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

# By ``id()``. Not a set, and without a lock, because an entry may be added in the middle of any other operation.
_connections: dict[int, weakref.ref[Any]] = {}


def register_connection(connection: Any, **kwargs: Any) -> None:
    """Register a Django connection. Also a receiver of ``connection_created``."""
    number = id(connection)
    # Not a function in Python: an exception that a signal handler raises in it would vanish.
    _connections[number] = weakref.ref(connection, partial(_connections.pop, number))


def aliases() -> dict[int, str]:
    """Return the aliases of open psycopg connections and of Django's pools, by the ``id()`` of each."""
    found: dict[int, str] = {}
    for connection in _known():
        if connection.connection is not None:
            found[id(connection.connection)] = connection.alias
        if pool := connection._connection_pools.get(connection.alias):  # noqa: SLF001 - ``pool`` would make one
            found[id(pool)] = connection.alias
    return found


def _known() -> Iterator[Any]:
    for each in list(_connections.values()):
        connection = each()
        if connection is not None and connection.vendor == "postgresql":
            yield connection
