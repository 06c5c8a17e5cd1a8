"""Locks in views of Django REST framework.

``lock_view`` is ``django_pglock.lock_view`` for handler methods, actions and functions below ``@api_view``. There
``request.user`` is the user whom the framework has authenticated, and a busy lock raises an exception of the framework.
``exception_handler`` answers ``LockNotAvailable`` from the code of any view with a problem detail (RFC 9457)::

    REST_FRAMEWORK = {"EXCEPTION_HANDLER": "django_pglock.contrib.rest_framework.exception_handler"}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from rest_framework.exceptions import APIException
from rest_framework.response import Response
from rest_framework.views import exception_handler as default_handler
from rest_framework.views import set_rollback

from django_pglock.errors import ConfigurationError, LockNotAvailable
from django_pglock.locks.responses import PROBLEM_JSON, busy_text, problem
from django_pglock.locks.views import STATUSES, View, check_retry_after
from django_pglock.locks.views import lock_view as lock_any_view


class Busy(APIException):  # type: ignore[misc]
    """The lock of a view is busy. ``status`` is the HTTP status; ``wait``, in seconds, becomes ``Retry-After``."""

    default_code = "busy"

    def __init__(self, *, status: int = 409, wait: int = 1) -> None:
        super().__init__(busy_text())
        self.status_code = status
        self.wait = wait


def lock_view(key: str, *, status: int = 409, retry_after: int = 1, **options: Any) -> Callable[[View], View]:
    """Return a decorator that runs a handler method, an action or a function below ``@api_view`` under a lock.

    Arguments as for ``django_pglock.lock_view``; ``retry_after`` is in seconds. A busy lock raises ``Busy``, which the
    framework answers with ``status`` and ``Retry-After``. Raises ``ConfigurationError`` for a wrong ``status`` or
    ``retry_after``, on a class, because its ``dispatch`` starts before the user is authenticated, and above
    ``@api_view``.
    """
    if status not in STATUSES:
        raise ConfigurationError(f"lock_view cannot answer with {status!r}; use one of {STATUSES}.")
    check_retry_after(retry_after)

    def raise_busy(error: LockNotAvailable, *args: Any, **kwargs: Any) -> NoReturn:
        raise Busy(status=status, wait=retry_after) from error

    decorate = lock_any_view(key, on_busy=raise_busy, **options)

    def decorate_handler(view: View) -> View:
        # A view function that the framework has made has this attribute. It answers only exceptions inside of it.
        if isinstance(view, type) or hasattr(view, "cls"):
            raise ConfigurationError(
                f"lock_view on {getattr(view, '__qualname__', view)}: put it below @api_view, or on handler methods "
                "of a class (post, create, an @action). There the request is authenticated, and the framework answers "
                "the exception for a busy lock."
            )
        return decorate(view)

    return decorate_handler


def exception_handler(error: Exception, context: dict[str, Any]) -> Response | None:
    """Answer a busy lock with a problem detail, and every other exception as the framework does."""
    if isinstance(error, LockNotAvailable):
        error = Busy()
    if not isinstance(error, Busy):
        answer: Response | None = default_handler(error, context)
        return answer
    set_rollback()
    renderer = getattr(context.get("request"), "accepted_renderer", None)
    return Response(
        problem(error.status_code),
        status=error.status_code,
        headers={"Retry-After": str(error.wait)},
        # A browser gets the HTML page of the framework.
        content_type=PROBLEM_JSON if getattr(renderer, "format", "json") == "json" else None,
    )
