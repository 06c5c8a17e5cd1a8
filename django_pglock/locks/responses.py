"""A lock that is held for a response that is still to be made or sent: streamed, or rendered after the view.

It ends with the first of these: the response is closed, or collected because nobody sends it (a middleware has put
another in its place or has raised, the client is gone); the request ends in this thread; ``MAX_RESPONSE_HOLD`` seconds
have passed. So no response that somebody forgets keeps a lock.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary, finalize

from asgiref.sync import SyncToAsync
from django.core.signals import request_finished, request_started

from django_pglock.conf import get_settings
from django_pglock.errors import LockError
from django_pglock.locks.alarms import call_later
from django_pglock.locks.async_handle import AsyncHandle
from django_pglock.locks.handle import Handle

logger = logging.getLogger("django_pglock.locks")


class ResponseLock:
    """A lock with its response. Ended from any thread, and as often as one likes."""

    def __init__(self, handle: Handle | AsyncHandle, response: Any) -> None:
        self._handle: Handle | AsyncHandle | None = handle
        self._guard = threading.Lock()
        self._thread = threading.get_ident()
        # Django calls these when it closes the response.
        response._resource_closers.append(self.end)
        finalize(response, self.end).atexit = False
        limit = get_settings().MAX_RESPONSE_HOLD
        self._alarm = call_later(limit, _end_late, self, limit)
        self._of_request = _of_request(isinstance(handle, Handle))
        self._of_request.append(self)

    def end(self) -> None:
        """Give the lock back, unless it was before."""
        with self._guard:
            handle, self._handle = self._handle, None
        if handle is None:
            return
        self._alarm.cancel()
        with suppress(ValueError):
            self._of_request.remove(self)
        if not isinstance(handle, Handle) or self._thread != threading.get_ident():
            handle.free_from_elsewhere()
            return
        try:
            handle.release()
        except LockError as error:
            # Django swallows what a closer raises, so this has to be said here.
            logger.error("%s", error)  # noqa: TRY400 - the sentence says it all

    @property
    def name(self) -> str:
        """The lock's name; nothing once it has ended."""
        handle = self._handle
        return handle.name if handle is not None else ""

    def __reduce__(self) -> tuple[Any, ...]:
        # A cache keeps rendered responses, with what is to be closed; the copy has no lock.
        return (_Ended, ())


class _Ended:
    """A response's lock in a copy of the response."""

    def end(self) -> None:
        """Do nothing."""


def _end_late(lock: ResponseLock, limit: float) -> None:
    if lock.name:
        logger.error(
            "Lock %r was freed: it was held for a response that nobody has closed within %g s "
            "(DJANGO_PGLOCK['MAX_RESPONSE_HOLD']).",
            lock.name,
            limit,
        )
    lock.end()


# The requests under way. A thread's are a stack, for a view may call another one, as Django's test client does. Under
# ASGI, what belongs to a request is known by the context that Django's handler opens for it.

_here = threading.local()
_by_context: WeakKeyDictionary[Any, list[ResponseLock]] = WeakKeyDictionary()


def _requests() -> list[list[ResponseLock]]:
    requests: list[list[ResponseLock]] = _here.__dict__.setdefault("requests", [])
    return requests


def _of_request(is_here: bool) -> list[ResponseLock]:
    """Return the locks of the request under way. ``is_here``: of a view of this thread."""
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        return _by_context.setdefault(context, [])
    requests = _requests() if is_here else []
    # Without a request (a view is called by a test) nobody tells that it ends.
    return requests[-1] if requests else []


def _begin_request(**kwargs: Any) -> None:
    if SyncToAsync.thread_sensitive_context.get(None) is None:
        _requests().append([])


def _end_request(**kwargs: Any) -> None:
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        left = _by_context.pop(context, [])
    elif requests := _requests():
        left = requests.pop()
    else:
        return
    for lock in [*left]:
        lock.end()


request_started.connect(_begin_request, dispatch_uid="django_pglock.locks.responses")
request_finished.connect(_end_request, dispatch_uid="django_pglock.locks.responses")
