"""The Django connections of all threads of this process, as far as they were registered here.

Django keeps the connections of a thread where no other thread finds them. A worker has to watch those of its task
threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

# By ``id()``. Neither a set nor a lock: an entry may be added in the middle of anything.
_connections: dict[int, weakref.ref[Any]] = {}


def note_connection(connection: Any, **kwargs: Any) -> None:
    """Register a Django connection. Also a receiver of ``connection_created``."""
    number = id(connection)
    _connections[number] = weakref.ref(connection, lambda _: _connections.pop(number, None))


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
