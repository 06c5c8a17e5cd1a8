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
#: These dates are returned as seconds since the epoch, because the server needs ten times as long to write a date. A
#: double is exact to the microsecond for the next two centuries. Python gets the double as text, because few of these
#: dates are ever read, and psycopg needs five times as long to convert it to a number.
DATES = ("run_after", "enqueued_at", "started_at", "last_attempted_at")
#: The largest ``attempts`` that a claim increases. A plain INSERT may write any number. If the claim of such a row
#: exceeded the type, the statement would fail again and again, and no other row of the queue could be claimed.
MOST_ATTEMPTS = 2**31 - 2
NEXT_ATTEMPT = f"LEAST(attempts, {MOST_ATTEMPTS}) + 1"
#: NULL for the first claim of a task, which most claims are.
STARTED_AT = "NULLIF({started_at}, {last_attempted_at})"


def claim_columns(quote: Callable[[str], str], prefix: str = "") -> str:
    """Return the columns of a claim as SQL."""
    columns = {name: f"{prefix}{quote(name)}" for name in CLAIM_COLUMNS}
    columns["started_at"] = STARTED_AT.format(**columns)
    return ", ".join(
        f"date_part('epoch', {column})::text" if name in DATES else column for name, column in columns.items()
    )
