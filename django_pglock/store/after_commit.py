"""Calls a function after a commit. If the function fails, the error is logged and not raised in the caller.

The error cannot undo the commit, and upkeep later does the work that the function could not do.

Django calls no function after a commit that the caller sends itself: with autocommit off, or after a ``BEGIN`` of its
own. There upkeep does the work. Notifications are part of the transaction, and PostgreSQL delivers them at the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import connections, transaction

from django_pglock.postgres.connections import has_commit_hooks, in_transaction
from django_pglock.store.statements import run


def after_commit(using: str, function: Callable[..., Any], *values: Any, **options: Any) -> None:
    """Call a function once the current transaction is committed; without a transaction, now.

    If the caller commits the transaction itself, the function is not called.
    """
    if commits_itself(connections[using]):
        return

    # No functools.partial: Django logs the name of a function that fails, and a partial has no name. The AttributeError
    # would be raised in the caller, and the later functions would not be called.
    def call() -> None:
        function(*values, **options)

    # Django reads only this name. functools.wraps would double the duration of this call.
    call.__qualname__ = function.__qualname__
    transaction.on_commit(call, using=using, robust=True)


def notify_after_commit(using: str, statement: str, *values: Any) -> None:
    """Execute a statement that only sends notifications once the current transaction is committed."""
    if commits_itself(connections[using]):
        run(using, statement, *values)
    else:
        after_commit(using, run, using, statement, *values)


def commits_itself(connection: Any) -> bool:
    """Return whether the caller sends the COMMIT of the current transaction itself."""
    return not has_commit_hooks(connection) and in_transaction(connection)
