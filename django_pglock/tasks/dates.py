"""The dates that Python has in each time zone. psycopg cannot read any others, nor 'infinity'."""

from __future__ import annotations

from datetime import datetime
from datetime import timezone as fixed

from django.utils import timezone

#: The first and the last date. PostgreSQL refuses others by the constraints of the tables.
READABLE = datetime(1, 1, 2, tzinfo=fixed.utc), datetime(9999, 12, 30, tzinfo=fixed.utc)


def is_readable(date: datetime) -> bool:
    """Return whether the tables accept the date; a naive one is in the time zone of the settings."""
    first, last = READABLE
    return first <= (timezone.make_aware(date) if timezone.is_naive(date) else date) <= last
