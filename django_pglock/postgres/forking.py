"""Makes forked child processes not use the sessions and sockets of their parent.

After ``fork()`` the child has the parent's sockets, too. If the child sent data on such a socket, it would be mixed
with the parent's data. If the child closed a connection, the parent's session would end. And while the child has the
socket open, the server does not notice the death of the parent. So in the child, each file descriptor is replaced by a
socket whose other end is closed. Code that still has a connection finds that it has ended, and opens a new one. The
inherited connection objects are neither used nor freed, because other threads of the parent may have used them at the
moment of the fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from django.db import connections
from django.db.backends.signals import connection_created
from psycopg import Error as PsycopgError

if TYPE_CHECKING:
    from _typeshed import HasFileno

#: prctl(2): the signal that the kernel sends to this process when its parent dies.
PR_SET_PDEATHSIG = 1

# By ``id()``. A WeakValueDictionary would run a function in Python at the end of each session, and an exception that a
# signal handler raises in it would vanish.
_channels: dict[int, ref[HasFileno]] = {}
# Per thread, because several threads may fork at once.
_here = threading.local()


def keep_from_children(channel: HasFileno) -> None:
    """Register ``channel``, to be closed in forked child processes. Django's connections are registered as well."""
    number = id(channel)
    _channels[number] = ref(channel, partial(_channels.pop, number))


def _keep_session_from_children(connection: Any, **kwargs: Any) -> None:
    if connection.vendor == "postgresql":
        raw = connection.connection
        # The pool of another package may lend an object of its own class, and keep psycopg's connection for later.
        keep_from_children(getattr(raw, "driver_connection", None) or raw)


def _before_fork() -> None:
    # In the child, the connection objects of other threads may no longer exist, but their sockets do.
    _here.inherited = [channel for each in list(_channels.values()) if (channel := each()) is not None]


def _after_fork_in_parent() -> None:
    del _here.inherited


def _after_fork_in_child() -> None:
    # The inherited objects are kept, because without a reference they would be closed.
    if not _here.inherited:
        return
    ended, other_end = socket.socketpair()
    other_end.close()
    with ended:
        for channel in _here.inherited:
            # An error means that the channel was closed before the fork.
            with suppress(OSError, PsycopgError):
                os.dup2(ended.fileno(), channel.fileno(), inheritable=False)
    _replace_connections()


def _replace_connections() -> None:
    """Give Django new connections in this thread, which is the only one: without transaction, hooks and held locks."""
    connection: Any
    for connection in connections.all(initialized_only=True):
        if connection.vendor == "postgresql":
            pools = getattr(connection, "_connection_pools", {})
            _here.inherited += pools.values()
            pools.clear()
            del connections[connection.alias]


if hasattr(os, "register_at_fork"):
    connection_created.connect(_keep_session_from_children, dispatch_uid="django_pglock.forking")
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it ends, or end now if it has ended already.

    Only Linux has this signal: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
