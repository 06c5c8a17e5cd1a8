"""Tells which test has opened a session of PostgreSQL, or a socket, that nobody closes.

Python warns when it deletes such an object. The garbage collector deletes an object in a circle of references, often
during a later test, and this test fails with the warning. So the warning names the test that has opened the object.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from psycopg._connection_base import BaseConnection

import django_pglock

PACKAGE = str(Path(django_pglock.__file__).parent)
ROOT = str(Path(__file__).parents[1])
#: So many calls of our own code are named, the innermost first.
MOST_CALLS = 5


class Origin(NamedTuple):
    """Where something was opened."""

    test: str
    thread: str
    calls: list[str]

    def __str__(self) -> str:
        return f"opened in {self.test}, in {self.thread}, by {' < '.join(self.calls) or 'no code of ours'}"


#: The sessions that have not been deleted.
_sessions: set[weakref.ref[BaseConnection[Any]]] = set()
#: By the address of the object: a socket has no place for more. A new socket at this address replaces the entry.
_sockets: dict[int, Origin] = {}
_open_session, _delete_session = BaseConnection.__init__, BaseConnection.__del__
_open_socket, _name_socket = socket.socket.__init__, socket.socket.__repr__


def note() -> None:
    """Note from here on where each session and each socket is opened."""
    BaseConnection.__init__ = _session_is_opened  # type: ignore[method-assign]
    BaseConnection.__del__ = _session_is_deleted  # type: ignore[method-assign]
    socket.socket.__init__ = _socket_is_opened  # type: ignore[method-assign]
    # The warning of a socket has its repr.
    socket.socket.__repr__ = _socket_with_origin  # type: ignore[method-assign]


def open_sessions() -> dict[BaseConnection[Any], Origin]:
    """Return the sessions of this process that are open, also those that only the garbage collector can find."""
    # A copy, because other threads open sessions.
    found = [each() for each in list(_sessions)]
    return {each: each._origin for each in found if each is not None and not each.closed}


def _session_is_opened(self: BaseConnection[Any], *arguments: Any) -> None:
    _open_session(self, *arguments)
    self._origin = _here()  # type: ignore[attr-defined]
    _sessions.add(weakref.ref(self, _sessions.discard))


def _session_is_deleted(self: BaseConnection[Any]) -> None:
    def warn(message: str, category: type[Warning]) -> None:
        warnings.warn(f"{message}; {self._origin}", category, stacklevel=3)  # type: ignore[attr-defined]

    # At the end of the interpreter, the names of this module are gone before some sessions are.
    if callable(_delete_session):
        # psycopg before 3.3 has no such argument.
        _delete_session(self, *([warn] if _delete_session.__defaults__ else []))


def _socket_is_opened(self: socket.socket, *arguments: Any, **options: Any) -> None:
    _open_socket(self, *arguments, **options)
    _sockets[id(self)] = _here()


def _socket_with_origin(self: socket.socket) -> str:
    return f"{_name_socket(self)[:-1]}, {_sockets.get(id(self), 'opened by C')}>"


def _here() -> Origin:
    test = os.environ.get("PYTEST_CURRENT_TEST", "no test")
    return Origin(test, threading.current_thread().name, _calls(sys._getframe(2)))


def _calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < MOST_CALLS:
        if _is_ours(name := frame.f_code.co_filename):
            calls.append(f"{os.path.basename(name)}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return calls


def _is_ours(name: str) -> bool:
    return name.startswith(PACKAGE) or (name.startswith(ROOT) and "site-packages" not in name)
