"""What follows a commit: done once, and a failure of it is logged and does not reach the caller.

What was committed stands, and upkeep does what was left undone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import transaction


def after_commit(using: str, function: Callable[..., Any], *values: Any, **options: Any) -> None:
    """Call a function once the current transaction is committed; without a transaction, now."""

    # No functools.partial: Django logs the name of a function that fails, and a partial has none. Its AttributeError
    # would reach the caller, and the functions behind it would not be called.
    def call() -> None:
        function(*values, **options)

    # The one name that Django reads. functools.wraps would take as long as all else here.
    call.__qualname__ = function.__qualname__
    transaction.on_commit(call, using=using, robust=True)
