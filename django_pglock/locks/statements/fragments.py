"""Parts of statements about advisory locks: the comment with the names, the call, the list of keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from django_pglock.keys import Key
from django_pglock.locks.options import Request

#: Characters of a name in a comment.
LONGEST_NAME = 200
#: pg_stat_activity shows the first kilobyte of a statement. With more names, the statement itself would not be shown.
MOST_NAMES = 4
_NOT_IN_COMMENTS = re.compile(r"[\x00-\x1f\x7f]|\*(?=/)|/(?=\*)")
#: For psycopg and many other programs a percent sign in a statement is a placeholder, also in a comment.
PERCENT = "\uff05"


def comment(keys: Sequence[Key]) -> str:
    """Return comments with the names of locks, for pg_stat_activity. They are never nested or unfinished."""
    return _comment(tuple(keys[:MOST_NAMES]))


@lru_cache(maxsize=1024)
def _comment(keys: tuple[Key, ...]) -> str:
    return "".join([f"/* django_pglock:{key.number} {_harmless(key.name)} */ " for key in keys])


def _harmless(name: str) -> str:
    # A slash or an asterisk at the end, next to that of the comment, could end the comment.
    shown = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return _NOT_IN_COMMENTS.sub("?", shown).replace("%", PERCENT)


def call(function: str, request: Request) -> str:
    """Return the beginning of a call of an advisory lock function, in the mode of the request."""
    return f"{function}{'_shared' if request.shared else ''}"


def keys_in_order(request: Request) -> str:
    """Return the set of rows ``k`` that yields the request's numbers in their order."""
    # Made from ints.
    return f"unnest(ARRAY[{','.join(str(key.number) for key in request.keys)}]::bigint[]) AS k"


def call_for_each(function: str, request: Request) -> str:
    """Return a SELECT that calls a function for each key, in order."""
    if len(request.keys) == 1:
        return f"SELECT {call(function, request)}({request.keys[0].number})"
    return f"SELECT {call(function, request)}(k) FROM {keys_in_order(request)}"


def held_keys(request: Request) -> str:
    """Return the FROM and WHERE that yield those keys ``k`` that this session holds.

    pg_locks shows a 64-bit key as two halves, with ``objsubid`` 1:
    https://www.postgresql.org/docs/current/view-pg-locks.html.
    """
    mode = "ShareLock" if request.shared else "ExclusiveLock"
    return (
        f"FROM {keys_in_order(request)} "
        "WHERE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND objsubid = 1 "
        f"AND granted AND mode = '{mode}' AND database = (SELECT oid FROM pg_database WHERE datname = "
        "current_database()) AND (classid::bigint << 32) | objid::bigint = k)"
    )
