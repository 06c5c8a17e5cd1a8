"""Finds an id by bisection: for example, an id below all tasks enqueued since a moment. A dozen primary key probes.

Ids grow with the time of enqueueing, and workers claim the oldest tasks first. So the tasks enqueued since a moment
have the highest ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from django.db.models.functions import Now

from django_pglock.store.statements import in_status, run

DAY = 86_400.0
#: The order of ids and the order of dates may differ by this number of seconds.
MARGIN = 60.0
#: A range of ids of this size is not bisected further.
PRECISION = 300
#: Digits of a bigint.
MOST_DIGITS = 19

# Two ids that are at most a number of ids apart: below the first, tasks were enqueued before a moment, and above the
# second at this moment or later. Ids have gaps, so a probe reads the next task behind the middle. The first and the
# last id of the table are found with LIMIT, as ``statements.py`` says.
BISECT = """
WITH RECURSIVE range AS (
    SELECT COALESCE((SELECT id FROM {task} ORDER BY id LIMIT 1), 1) - 1 AS low,
           COALESCE((SELECT id FROM {task} ORDER BY id DESC LIMIT 1), 0) + 1 AS high
    UNION ALL
    SELECT CASE WHEN probe.is_low THEN middle.id ELSE range.low END,
           CASE WHEN probe.is_low THEN range.high ELSE middle.id END
    FROM range CROSS JOIN LATERAL (SELECT (range.low + range.high) / 2 AS id) AS middle
    CROSS JOIN LATERAL (SELECT COALESCE((
        SELECT next.enqueued_at < COALESCE(%s::timestamptz, clock_timestamp() - make_interval(secs => %s))
        FROM {task} AS next WHERE next.id >= middle.id ORDER BY next.id LIMIT 1
    ), false) AS is_low) AS probe
    WHERE range.high - range.low > %s
)
SELECT max(low), min(high) FROM range
"""


def ids_between(using: str, since: datetime | None, before: datetime | None) -> dict[str, int]:
    """Return conditions on the ids of the tasks that were enqueued since one moment and before another one.

    Ids are only roughly in the order of time, so compare the times as well.
    """
    found: dict[str, int] = {}
    if since:
        [(found["pk__gt"], _)] = run(using, BISECT, since, 0, PRECISION)
    if before:
        [(_, found["pk__lt"])] = run(using, BISECT, before, 0, PRECISION)
    return found


def first_id_since(using: str, seconds: float) -> int:
    """Return an id above all tasks that were enqueued more than a number of seconds ago, and close above them.

    A minute is added, because a clock may have been set.
    """
    [(_, first)] = run(using, BISECT, None, seconds - MARGIN, 1)
    return int(first)


def search_end(tasks: Any, *, most: int) -> int | None:
    """Return the id of the task behind the first ``most`` of these tasks; None if there is none."""
    return next(iter(tasks.values_list("pk", flat=True)[most : most + 1]), None)


def id_in(text: str) -> int | None:
    """Return the id that a text is; None if it is not a number that the id of a task can be."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
    return int(text) if is_number and int(text) < 2**63 else None


def newest(tasks: Any, limit: int, *, statuses: Iterable[str] = (), days: float | None = None) -> list[Any]:
    """Return up to ``limit`` of these tasks, the newest first.

    - ``statuses``: only tasks with one of these statuses; none: with any.
    - ``days``: only tasks that were enqueued more than this number of days ago.

    Sends one statement for each status, in the order of the index on status and id. For several statuses in one
    statement, the planner would read the tasks of all statuses by the primary key.
    """
    if days is not None:
        # Without the id, the search for old tasks would read all tasks that are newer.
        is_old = {"pk__lt": first_id_since(tasks.db, days * DAY), "enqueued_at__lt": Now() - timedelta(days=days)}
        tasks = tasks.filter(**is_old)
    wanted = sorted(set(statuses))
    parts = [in_status(tasks, status).order_by("-status", "-pk") for status in wanted]
    found = [row for part in parts or [tasks.order_by("-pk")] for row in part[:limit]]
    return sorted(found, key=attrgetter("pk"), reverse=True)[:limit]
