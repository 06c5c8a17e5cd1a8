"""The rows of schedules, and the scheduled functions that this process knows.

A tick is one date at which a schedule is due. The verbs of schedules are in ``schedule_register.py``,
``schedule_tick.py``, ``schedule_switch.py`` (enable and disable) and ``schedule_run_now.py``.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from django_pglock.errors import DuplicateTask
from django_pglock.loggers import get_logger
from django_pglock.postgres.connections import transaction_block
from django_pglock.store.statements import run
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")

# The server's clock, and the dates of the schedules in UTC without a zone. Django returns such dates unchanged, with
# and without USE_TZ. Schedules of functions that this process does not know are not read.
SCHEDULES = """
SELECT task_path, expression, timezone, is_enabled, next_at AT TIME ZONE 'UTC', clock_timestamp() AT TIME ZONE 'UTC'
FROM {schedule} WHERE task_path = ANY (%s::text[]) ORDER BY next_at, task_path
"""


class Row(NamedTuple):
    """A schedule, and the time at which it was read. Dates are in UTC."""

    path: str
    is_enabled: bool
    next_at: datetime
    now: datetime
    #: The first tick after now. All ticks that were missed are run once together.
    following: datetime

    @property
    def is_due(self) -> bool:
        """Whether its tick has come."""
        return self.is_enabled and self.next_at <= self.now


def known(using: str) -> dict[str, TaskFields]:
    """Return the scheduled functions that this process knows and whose tasks are in this database, by path."""
    tasks = registry.scheduled()
    return {task.module_path: task for task in tasks if getattr(task.get_backend(), "database", None) == using}


def timings(using: str) -> dict[str, Timing]:
    """Return the timings of the known functions by the code."""
    return {path: timing_of(task) for path, task in known(using).items()}


def read_rows(using: str, paths: Iterable[str]) -> list[Row]:
    """Return the schedules of these functions that can be parsed, the longest due first."""
    if not (wanted := list(paths)):
        return []
    return [row for each in run(using, SCHEDULES, wanted) if (row := _read(*each))]


def enqueue_scheduled(using: str, task: TaskFields, meta: dict[str, Any]) -> int | None:
    """Enqueue a scheduled function. Return the id of its task, None if ``unique=`` has refused it."""
    try:
        with transaction_block(using):
            return int(task.using(meta={**task.meta, **meta}).enqueue().id)
    except DuplicateTask as error:
        logger.info("The schedule of %s enqueued no task: %s", task.module_path, error)
        return None


def utc(moment: datetime) -> datetime:
    """Make a naive moment, which the server has sent in UTC, aware."""
    return moment.replace(tzinfo=timezone.utc)


def _read(path: str, expression: str, zone: str, is_enabled: bool, next_at: datetime, now: datetime) -> Row | None:
    next_at, now = utc(next_at), utc(now)
    try:
        following = Timing(expression, zone).following(next_at, now) if next_at <= now else next_at
    except Exception:
        # Another version of the code may have written it, with another version of cronsim.
        logger.exception(
            "The schedule of %s, %r in %r, cannot be read by this worker and is not changed.", path, expression, zone
        )
        return None
    return Row(path, is_enabled, next_at, now, following)
