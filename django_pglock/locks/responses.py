"""Responses: the one to a request whose lock is busy, and those that keep a lock until they are sent.

A response that is streamed, or rendered after the view, keeps the lock of its view. The lock ends with the first of
these events: the response is closed; the response is garbage-collected because it is not sent (a middleware has
replaced it or has raised, the client has disconnected); the request ends; an hour has passed. So a response that is
never closed does not keep its lock.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any
from weakref import WeakKeyDictionary, finalize

from asgiref.sync import SyncToAsync
from django.core.signals import request_finished, request_started
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.utils.cache import patch_vary_headers
from django.utils.html import format_html
from django.utils.translation import get_language, get_language_bidi
from django.utils.translation import gettext as _

from django_pglock.errors import LockError, LockNotAvailable
from django_pglock.locks.coroutines import AsyncHandle
from django_pglock.locks.handle import Handle
from django_pglock.locks.retries import retry
from django_pglock.loggers import get_logger

logger = get_logger("django_pglock.locks")

#: The content type of ``problem``.
PROBLEM_JSON = "application/problem+json"
#: The content types of the response. A client that accepts any type, such as curl and fetch, gets the first one; the
#: last one if it has sent JSON.
TYPES = ("text/plain", "text/html", "application/json", PROBLEM_JSON)
#: The page of a project without its own template. No inline style or script, because a strict CSP forbids them.
PAGE = (
    '<!doctype html>\n<html lang="{}" dir="{}">\n<head><meta charset="utf-8"><title>{}</title></head>\n'
    "<body><h1>{}</h1><p>{}</p></body>\n</html>\n"
)


def busy_response(
    error: LockNotAvailable, request: HttpRequest, *args: Any, status: int, retry_after: int, **kwargs: Any
) -> HttpResponse:
    """Return the response to a busy lock. It does not have the lock's name, which may contain a user's id."""
    preferred = request.get_preferred_type(TYPES[::-1] if request.content_type in TYPES[2:] else TYPES)
    response: HttpResponse
    if preferred == "text/html":
        response = HttpResponse(_page(request, status, retry_after), status=status)
    elif preferred in ("application/json", PROBLEM_JSON):
        response = JsonResponse(problem(status), status=status, content_type=PROBLEM_JSON)
    else:
        response = HttpResponse(busy_text(), status=status, content_type="text/plain; charset=utf-8")
    response["Retry-After"] = str(retry_after)
    patch_vary_headers(response, ["Accept"])
    return response


def busy_text() -> str:
    """Return the text for a person whose request met a busy lock."""
    return _("This is being done already. Please wait a moment before you try again.")


def problem(status: int = HTTPStatus.CONFLICT) -> dict[str, Any]:
    """Return a problem detail (RFC 9457)."""
    return {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": busy_text()}


def _page(request: HttpRequest, status: int, retry_after: int) -> str:
    """Render the project's template of this status, ``409.html``, as Django does with ``404.html``."""
    try:
        template = loader.get_template(f"{status}.html")
    except TemplateDoesNotExist:
        title = HTTPStatus(status).phrase
        direction = "rtl" if get_language_bidi() else "ltr"
        return format_html(PAGE, get_language() or "en", direction, title, title, busy_text())
    return template.render({"message": busy_text(), "retry_after": retry_after}, request)


#: Seconds after which the lock of a response is released even if the response was never closed.
LONGEST_HOLD = 3600.0


class ResponseLock:
    """A lock with its response. It may be closed in any thread, and more than once."""

    def __init__(self, handle: Handle | AsyncHandle, response: Any) -> None:
        self._handle: Handle | AsyncHandle | None = handle
        # Reentrant, because Python may collect the response while this thread holds the guard.
        self._guard = threading.RLock()
        self._thread = threading.get_ident()
        # Django calls these when it closes the response.
        response._resource_closers.append(self.close)
        self._finalizer = finalize(response, self.drop)
        self._finalizer.atexit = False
        _begun[self] = time.monotonic()
        retry(_end_late)
        self._of_request = _of_request()
        self._of_request.append(self)

    def close(self) -> None:
        """Release the lock with its response, and log whether it was lost meanwhile."""
        handle = self._pop_handle()
        if handle is None:
            return
        if not isinstance(handle, Handle) or self._thread != threading.get_ident():
            handle.release_from_any_thread()
            return
        try:
            handle.release()
        except LockError as error:
            # Django ignores exceptions of closers, so the error is logged here.
            logger.error("%s", error)  # noqa: TRY400 - the message says it all

    def drop(self) -> Handle | AsyncHandle | None:
        """Free the lock of a response that is not sent, and return its handle. Thread-safe."""
        handle = self._pop_handle()
        if handle is not None:
            handle.free_from_any_thread()
        return handle

    def _pop_handle(self) -> Handle | AsyncHandle | None:
        with self._guard:
            handle, self._handle = self._handle, None
        if handle is not None:
            # Otherwise it would run when the response is deleted, and an exception of a signal handler would vanish.
            self._finalizer.detach()
            _begun.pop(self, None)
            with suppress(ValueError):
                self._of_request.remove(self)
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        # A cache pickles rendered responses with their closers, one of which is our method. The copy has no lock.
        return (ExitStack, ())


#: The locks that are held, the oldest first, and since when.
_begun: dict[ResponseLock, float] = {}


def _end_late() -> bool:
    """End the locks of responses that were not closed for too long. Return whether no lock is left."""
    for lock, begun in list(_begun.items()):
        if time.monotonic() - begun < LONGEST_HOLD:
            return False
        # The lock is freed first: the log may be slow, and others wait for the lock.
        if (handle := lock.drop()) is not None:
            text = "Lock %r was released, because its response was not closed within %g s."
            logger.error(text, handle.name, LONGEST_HOLD)
    return not _begun


# The locks of the current request. Under WSGI, a thread has one request after the other. A request may also begin
# inside another one, for example by Django's test client in a view. Under ASGI, the context that Django's handler opens
# identifies the request. Sync code of the request, such as a receiver of request_started, has a thread that ends with
# the request. If a stream raises there, Django sends no request_finished and does not close the response.

_by_context: WeakKeyDictionary[Any, list[ResponseLock]] = WeakKeyDictionary()
#: The attribute ``until`` is an object that Python deletes at the end of the thread.
_thread = threading.local()
#: The locks of a thread's request, and the request inside which it began, in the same form.
_request: ContextVar[tuple[list[ResponseLock], Any] | None] = ContextVar("django_pglock_request", default=None)


def _of_request() -> list[ResponseLock]:
    """Return the locks of the current request."""
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        return _by_context.setdefault(context, [])
    request = _request.get()
    # Without a request, for example if a test calls a view, no signal reports its end.
    return [] if request is None else request[0]


def _begin_request(**kwargs: Any) -> None:
    if (context := SyncToAsync.thread_sensitive_context.get(None)) is None:
        _request.set(([], _request.get()))
    else:
        _thread.until = set()
        finalize(_thread.until, _drop_all, _by_context.setdefault(context, [])).atexit = False


def _drop_all(locks: list[ResponseLock]) -> None:
    for lock in [*locks]:
        lock.drop()


def _end_request(**kwargs: Any) -> None:
    context = SyncToAsync.thread_sensitive_context.get(None)
    if context is not None:
        locks = _by_context.pop(context, [])
    elif (request := _request.get()) is not None:
        locks, outer = request
        _request.set(outer)
    else:
        return
    _drop_all(locks)


request_started.connect(_begin_request, dispatch_uid="django_pglock.locks.responses")
request_finished.connect(_end_request, dispatch_uid="django_pglock.locks.responses")
