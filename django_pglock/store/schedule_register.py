"""Registers schedules: writes the schedules of the code into the table. Their ticks count from that moment."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django_pglock.store.schedule_rows import timings, utc
from django_pglock.store.statements import rows_of, run
from django_pglock.tasks.schedules import Timing

# Writes a schedule that is new or has changed in the code. An ON CONFLICT DO UPDATE would also lock a row that is up to
# date, so ``register`` leaves such schedules out.
REGISTER_SCHEDULE = """
INSERT INTO {schedule} AS schedule (task_path, expression, timezone, next_at)
VALUES (%s, %s, %s, %s)
ON CONFLICT (task_path) DO UPDATE
SET expression = EXCLUDED.expression, timezone = EXCLUDED.timezone, next_at = EXCLUDED.next_at
WHERE (schedule.expression, schedule.timezone) <> (EXCLUDED.expression, EXCLUDED.timezone)
RETURNING task_path
"""


def register(using: str) -> list[str]:
    """Write the schedules of the known functions into the table. Return the paths that are new or have changed.

    For a new schedule, and for one whose expression or zone has changed, the first tick is the first one after now.
    """
    wanted = timings(using)
    if not wanted:
        return []
    now = _now(using)
    paths = list(wanted)
    written = {path: Timing(*timing) for path, *timing in _written(using, paths)}
    # One statement for each schedule. So a transaction that waits for a row has locked no other row, and cannot
    # deadlock with a tick, or with a person who deletes schedules.
    new = [(path, timing) for path, timing in wanted.items() if written.get(path) != timing]
    return [path for path, timing in new if _register(using, path, timing, timing.following(now, now))]


def _written(using: str, paths: list[str]) -> Any:
    return rows_of("Schedule", using).filter(pk__in=paths).values_list("pk", "expression", "timezone")


def _register(using: str, path: str, timing: Timing, first: datetime) -> bool:
    return bool(run(using, REGISTER_SCHEDULE, path, timing.expression, timing.zone, first))


def _now(using: str) -> datetime:
    [(now,)] = run(using, "SELECT clock_timestamp() AT TIME ZONE 'UTC'")
    return utc(now)
