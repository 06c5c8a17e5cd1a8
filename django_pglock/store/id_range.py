"""Where in the ids of all tasks something begins, by halving the range of ids: a dozen probes of the primary key.

Ids grow with the time of enqueueing, and workers claim the oldest tasks first. So tasks enqueued since a moment have
the highest ids, and above the newest tasks that have succeeded there may be very many that wait.
"""

from __future__ import annotations

from datetime import datetime

from django_pglock.store.sql import run

#: The range of ids that is not halved again.
ROUGHLY = 300

# What is true for low ids and false for high ones is the only difference between the two statements. Ids have gaps, so
# a probe looks at the next tasks behind the middle. ``low`` and ``high`` end up ``ROUGHLY`` ids apart.
_HALVE = """
WITH RECURSIVE range AS (
    SELECT COALESCE(min(id), 1) - 1 AS low, COALESCE(max(id), 0) + 1 AS high, true AS is_wide FROM {{task}}
    UNION ALL
    SELECT CASE WHEN probe.is_low THEN middle.id ELSE range.low END,
           CASE WHEN probe.is_low THEN range.high ELSE middle.id END, range.high - range.low > {roughly}
    FROM range CROSS JOIN LATERAL (SELECT (range.low + range.high) / 2 AS id) AS middle
    CROSS JOIN LATERAL (SELECT COALESCE(bool_or({is_low}), false) AS is_low FROM (
        SELECT task.enqueued_at, task.status FROM {{task}} AS task
        WHERE task.id >= middle.id ORDER BY task.id LIMIT {sample}) AS next) AS probe
    WHERE range.is_wide
)
"""

# An id below that of the first task enqueued at a moment or later.
FIRST_SINCE = _HALVE.format(is_low="next.enqueued_at < %s", sample=1, roughly=ROUGHLY) + "SELECT max(low) FROM range"

# An id above which samples show only tasks that have not succeeded, if there is a task above it.
ABOVE_SUCCEEDED = (
    _HALVE.format(is_low="next.status = 'SUCCESSFUL'", sample=20, roughly=ROUGHLY)
    + "SELECT found.high FROM (SELECT min(high) AS high FROM range) AS found"
    " WHERE EXISTS (SELECT FROM {task} AS task WHERE task.id >= found.high)"
)


def first_since(using: str, moment: datetime) -> int:
    """Return an id that is lower than the id of the first task enqueued at ``moment`` or later."""
    [(found,)] = run(using, FIRST_SINCE, moment)
    return int(found)


def above_succeeded(using: str) -> int | None:
    """Return an id above which no sample has found a task that has succeeded; None if samples of the newest have."""
    return next((int(high) for (high,) in run(using, ABOVE_SUCCEEDED)), None)
