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
#: Returned as seconds since the epoch. A text would take the server ten times as long, and a date the worker, but few
#: of these dates are ever read. A double holds the microseconds of the next two centuries.
DATES = ("run_after", "enqueued_at", "started_at", "last_attempted_at")


def claim_columns(quote: Callable[[str], str], prefix: str = "") -> str:
    """Return the columns of a claim as SQL."""
    columns = [f"{prefix}{quote(each)}" for each in CLAIM_COLUMNS]
    return ", ".join(
        f"date_part('epoch', {column})" if name in DATES else column
        for name, column in zip(CLAIM_COLUMNS, columns, strict=True)
    )
