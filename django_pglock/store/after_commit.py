"""Calls a function after a commit. If the function fails, the error is logged and not raised in the caller.

The error cannot undo the commit, and upkeep later does the work that the function could not do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import transaction


def after_commit(using: str, function: Callable[..., Any], *values: Any, **options: Any) -> None:
    """Call a function once the current transaction is committed; without a transaction, now."""

    # No functools.partial: Django logs the name of a function that fails, and a partial has no name. The AttributeError
    # would be raised in the caller, and the later functions would not be called.
    def call() -> None:
        function(*values, **options)

    # Django reads only this name. functools.wraps would double the duration of this call.
    call.__qualname__ = function.__qualname__
    transaction.on_commit(call, using=using, robust=True)
