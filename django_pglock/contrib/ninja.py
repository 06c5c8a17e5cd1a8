"""Locks in operations of django-ninja.

``lock_view`` is ``django_pglock.lock_view`` for operations: put it below the decorator of the operation.
``add_lock_handler(api)`` answers ``LockNotAvailable`` from the code of any operation. Both answer with the status 409,
``Retry-After`` and a problem detail (RFC 9457)::

    add_lock_handler(api)

    @api.post("/orders/{order_id}/pay")
    @lock_view("pay:{order_id}")
    def pay(request, order_id: int): ...
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from django.http import HttpRequest, JsonResponse

from django_pglock.errors import LockNotAvailable
from django_pglock.locks.responses import PROBLEM_JSON, problem
from django_pglock.locks.views import View
from django_pglock.locks.views import lock_view as lock_any_view


def busy(error: LockNotAvailable, request: HttpRequest, *args: Any, **kwargs: Any) -> JsonResponse:
    """Return the response to a request whose lock is busy: status 409, ``Retry-After`` and a problem detail."""
    return JsonResponse(problem(), status=409, content_type=PROBLEM_JSON, headers={"Retry-After": "1"})


def lock_view(key: str, **options: Any) -> Callable[[View], View]:
    """Return a decorator that runs an operation under a lock.

    Arguments and errors as for ``django_pglock.lock_view``. A busy lock is answered with a problem detail, unless
    ``on_busy`` is given.
    """
    decorate = lock_any_view(key, **{"on_busy": busy, **options})

    def decorate_operation(view: View) -> View:
        locked = decorate(view)
        # The framework would resolve the names in the annotations of the view in the module of the decorator.
        vars(locked)["__signature__"] = inspect.signature(view, eval_str=True)
        return locked

    return decorate_operation


def add_lock_handler(api: Any) -> None:
    """Let a ``NinjaAPI`` answer ``LockNotAvailable`` from any of its operations as ``busy`` does."""
    api.add_exception_handler(LockNotAvailable, lambda request, error: busy(error, request))
