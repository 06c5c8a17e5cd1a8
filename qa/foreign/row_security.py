"""A middleware that tells PostgreSQL whose request it is, as projects with row-level security write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django.db import connection
from django.http import HttpRequest, HttpResponse


@contextmanager
def acting_as(user: str) -> Iterator[None]:
    """Set the user of this session for as long as the block lasts."""
    _set(user)
    try:
        yield
    finally:
        _set("")


def _set(user: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('app.user', %s, false)", [user])


class UserMiddleware:
    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        with acting_as(request.headers["user"]):
            return self.get_response(request)
