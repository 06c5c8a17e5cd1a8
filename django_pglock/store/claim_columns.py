"""Which columns a claiming statement returns, as the fields of ``Claim``."""

from __future__ import annotations

from collections.abc import Callable

#: In the order of the fields of ``Claim``, without the worker.
CLAIM_COLUMNS = (
    "id",
    "attempts",
    "backend",
    "queue",
    "priority",
    "task_path",
    "args",
    "kwargs",
    "meta",
    "retries",
    "max_retries",
    "rescues",
    "run_after",
    "enqueued_at",
    "started_at",
    "last_attempted_at",
    "lock_key",
    "uncounted",
)
#: Returned as seconds since the epoch: a date as text would take the server ten times as long. A double holds the
#: microseconds of the next two centuries. It is returned as text, because few of these dates are ever read, and psycopg
#: needs five times as long to make a number of it.
DATES = ("run_after", "enqueued_at", "started_at", "last_attempted_at")
#: NULL if this is the first claim, as most are.
STARTED_AT = "NULLIF({started_at}, {last_attempted_at})"


def claim_columns(quote: Callable[[str], str], prefix: str = "") -> str:
    """Return the columns of a claim as SQL."""
    columns = {name: f"{prefix}{quote(name)}" for name in CLAIM_COLUMNS}
    columns["started_at"] = STARTED_AT.format(**columns)
    return ", ".join(
        f"date_part('epoch', {column})::text" if name in DATES else column for name, column in columns.items()
    )
