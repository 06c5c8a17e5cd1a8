"""A middleware that answers a busy lock, wherever in a view the lock was requested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

from django_pglock.errors import LockNotAvailable
from django_pglock.locks.responses import busy_response


class LockNotAvailableMiddleware:
    """Answers ``LockNotAvailable`` from a view with the status 409 and ``Retry-After: 1``, as ``lock_view`` does.

    It can have any place in ``MIDDLEWARE`` and works for sync and async views.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        if iscoroutinefunction(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """Return the response to a busy lock, or None for every other exception."""
        if isinstance(exception, LockNotAvailable):
            return busy_response(exception, request, status=409, retry_after=1)
        return None
