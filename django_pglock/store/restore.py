"""Moves archived tasks back to the table of tasks, for a project that wants to be without an archive again.

A batch is one transaction, so a task is in one of the two tables at each moment. Tasks whose rows are locked, and tasks
whose id another task has, stay in the archive. The archive has no ``unique_scope``. A task with a unique key gets
UNFINISHED: it has finished, so it does not take the key.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import NamedTuple

from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.store.archive import ATTEMPT, COLUMNS
from django_pglock.store.archive_state import bounds_of, existing_archive
from django_pglock.store.count import MOST_COUNTED
from django_pglock.store.statements import BY_INDEX, rows_of, run_together

#: Tasks that one batch moves.
RESTORED_AT_ONCE = 1000

# No plan with a sequential scan, because a batch is small beside its day, whatever the statistics say.
LIMIT_RESTORE = f"SELECT {BY_INDEX}, set_config('enable_seqscan', 'off', true)"

# The next tasks of a day. The id does not identify an archived task: the key of the archive has the date, too.
RESTORE = f"""
WITH next AS MATERIALIZED (
    SELECT {COLUMNS}, failed_attempts FROM {{archived_task}}
    WHERE finished_at >= %s AND finished_at < %s AND id > %s ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
), restored AS (
    INSERT INTO {{task}} ({COLUMNS}, unique_scope)
    SELECT {COLUMNS}, CASE WHEN unique_key IS NOT NULL THEN 'UNFINISHED' END FROM next
    ON CONFLICT (id) DO NOTHING RETURNING id, finished_at
), attempts AS (
    INSERT INTO {{attempt}} (task_id, {ATTEMPT})
    SELECT next.id, {", ".join(f"attempt.{name.strip()}" for name in ATTEMPT.split(","))}
    FROM next JOIN restored USING (id, finished_at)
    CROSS JOIN LATERAL jsonb_to_recordset(next.failed_attempts) AS attempt (
        number integer, worker uuid, worker_name text, started_at timestamptz, finished_at timestamptz, outcome text,
        exception_path text, traceback text, log text)
), gone AS (
    DELETE FROM {{archived_task}} AS archived
    WHERE archived.finished_at >= %s AND archived.finished_at < %s
      AND archived.id = ANY (ARRAY(SELECT id FROM restored))
      AND (archived.id, archived.finished_at) IN (SELECT id, finished_at FROM restored)
    RETURNING 1
)
SELECT (SELECT max(id) FROM next), count(*) FROM gone
"""


class Restored(NamedTuple):
    """How many tasks were moved back, and how many are still in the archive, counted up to ``MOST_COUNTED`` + 1."""

    moved: int
    left: int


def restore(
    using: str, *, batch: int = RESTORED_AT_ONCE, progress: Callable[[date, int], None] | None = None
) -> Restored:
    """Move all tasks of the archive back to the table of tasks, ``batch`` tasks in each transaction.

    ``progress`` is called after each day that had tasks, with the day and the number of tasks that were moved. Raises
    ``ConfigurationError`` if the archive is on, because workers would move the tasks to it again. The message is
    translated, because ``locktasks archive restore`` prints it.
    """
    state = existing_archive(using)
    if state.is_on:
        raise ConfigurationError(
            _("The archive is on: workers would move the tasks to it again. Run: manage.py locktasks archive off")
        )
    total = 0
    for day in state.days:
        count = _restore_day(using, day, batch)
        total += count
        if count and progress:
            progress(day, count)
    left = rows_of("ArchivedTask", using).order_by()[: MOST_COUNTED + 1].count()
    return Restored(total, left)


def _restore_day(using: str, day: date, batch: int) -> int:
    count, after = _restore_window(using, day, 0, batch)
    while after:
        more, after = _restore_window(using, day, after, batch)
        count += more
    return count


def _restore_window(using: str, day: date, after: int, batch: int) -> tuple[int, int]:
    """Move tasks of a day, by UTC: those of one window behind the id ``after``.

    Returns how many tasks were moved, and the id behind which to continue: 0 if the day has no more.
    """
    bounds = bounds_of(day)
    parts = (LIMIT_RESTORE, ()), (RESTORE, (*bounds, after, batch, *bounds))
    [(last, count)] = run_together(using, *parts)
    return int(count), int(last or 0)
