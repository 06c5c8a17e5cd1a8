"""The dates that Python has in each time zone. psycopg cannot read any others, nor 'infinity'."""

from __future__ import annotations

from datetime import datetime, timezone

READABLE = datetime(1, 1, 2, tzinfo=timezone.utc), datetime(9999, 12, 30, tzinfo=timezone.utc)
