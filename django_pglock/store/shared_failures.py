"""The groups of failed tasks that a worker has counted for the pages of the admin (shared_counts.py).

A count of hundreds of groups reads thousands of pages of the index. Its result is one small JSON document.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from django_pglock.conf import get_settings
from django_pglock.store.failures import FailureCounts, failures
from django_pglock.store.liveness import is_recent
from django_pglock.store.statements import run

#: Seconds after which counts are too old for a page. Then the page itself counts.
MAX_AGE_FOR_PAGES = 120.0
#: The fields with dates, which are texts in JSON.
_DATES = ("first_at", "last_at")

# The stored groups. No row if they are too old, or if no worker is alive: then no worker will count again.
READ_FAILURES = f"""
SELECT failures, EXTRACT(EPOCH FROM clock_timestamp() - counted_at)::float8 FROM {{queue_count}}
WHERE queue = '' AND failures IS NOT NULL AND {is_recent("counted_at")}
  AND EXISTS (SELECT FROM {{worker}} WHERE {is_recent("heartbeat_at")})
"""

# Deletes the stored groups. A count that has begun before does not store its groups, because the row no longer has the
# date of that count.
INVALIDATE_FAILURES = """
UPDATE {queue_count} SET failures = NULL, count_again_at = clock_timestamp() WHERE queue = ''
"""


class SharedFailures(NamedTuple):
    """The groups of failed tasks, and how many seconds ago a worker has counted them. None: they were counted now."""

    groups: list[FailureCounts]
    age: float | None


def shared_failures(using: str) -> SharedFailures:
    """Return the groups of failed tasks that a worker has counted lately.

    Count them now if no worker is alive, or if none has counted.
    """
    for groups, age in run(using, READ_FAILURES, MAX_AGE_FOR_PAGES, get_settings().HEARTBEAT_LIMIT):
        return SharedFailures([_group(each) for each in _loaded(groups)], age)
    return SharedFailures(failures(using), None)


def invalidate_failures(using: str) -> None:
    """Make the next page count again, because the groups have been changed."""
    run(using, INVALIDATE_FAILURES)


def as_json(groups: Sequence[FailureCounts]) -> str:
    """Return the groups as the document that ``shared_failures`` reads."""
    # PostgreSQL cannot store a NUL character, so values that were read from it contain none.
    return json.dumps([asdict(each) for each in groups], default=datetime.isoformat)


def _loaded(document: Any) -> Any:
    # Django configures psycopg to return JSON as text.
    return json.loads(document) if isinstance(document, str) else document


def _group(values: dict[str, Any]) -> FailureCounts:
    dates = {name: datetime.fromisoformat(values[name]) for name in _DATES}
    return FailureCounts(**{**values, **dates, "by_hour": tuple(values["by_hour"])})
