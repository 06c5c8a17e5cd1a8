"""A middleware for projects that take locks somewhere deep inside: busy is answered, wherever it was met."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.http import HttpRequest, HttpResponse

from django_pglock.errors import LockNotAvailable
from django_pglock.locks.views import busy_response


class LockNotAvailableMiddleware:
    """Answer ``LockNotAvailable`` that a view lets through with 409 and ``Retry-After``, as ``lock_view`` does.

    Put it anywhere in ``MIDDLEWARE``; sync and async views are both served.
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
        """Answer a busy lock; leave every other exception to others."""
        if isinstance(exception, LockNotAvailable):
            return busy_response(exception, request, status=409, retry_after=1)
        return None
