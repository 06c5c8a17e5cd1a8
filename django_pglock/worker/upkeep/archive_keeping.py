"""The archive's part of the upkeep: moves finished tasks, and drops the days that are older than PRUNE_AFTER allows."""

from __future__ import annotations

import time

from django.db import DatabaseError

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.archive import AGE, MOVED_AT_ONCE, archive_window
from django_pglock.store.archive_days import drop_days
from django_pglock.store.archive_state import UNTIL_FIRST_MOVE, archive_state, references_to_tasks
from django_pglock.store.prune import DAY, ages_of
from django_pglock.tasks.states import TaskStatus

logger = get_logger(WORKER)

#: Seconds between two checks whether the archive is on, and between two passes through the tasks.
CHECK_INTERVAL = 30.0
#: Seconds for which one call of ``run_if_due()`` moves tasks, and seconds until the next call if tasks are left. They
#: are short, because the same thread promotes due tasks, and rescues tasks of dead workers.
TIME_TO_MOVE, BETWEEN_BATCHES = 0.2, 0.5
#: Seconds between two checks for days that have to be dropped.
BETWEEN_DROPS = 60.0
#: SQLSTATE of a missing right.
NO_RIGHT = "42501"


class ArchiveKeeping:
    """Moves tasks for a short time in each call of ``run_if_due()``. The next call continues where this one ended."""

    def __init__(self, using: str) -> None:
        self.using = using
        self._check_at = 0.0
        self._drop_at = 0.0
        # The task id up to which the present pass has come.
        self._moved_to = 0
        # The number of tasks in a batch. It is smaller after a batch that has failed, for example because of large
        # rows.
        self._batch = MOVED_AT_ONCE
        # The reasons that have been logged. Each one is logged once while it lasts.
        self._logged: set[str] = set()

    def run_if_due(self, interval_factor: float = 1.0) -> float | None:
        """Move tasks and drop days, if due. Return the seconds until more can be moved; None if all are moved.

        ``interval_factor``: a standby worker multiplies the interval of this check by this factor.
        """
        now = time.monotonic()
        if now < self._check_at:
            return self._check_at - now if self._moved_to else None
        self._check_at = now + CHECK_INTERVAL * interval_factor
        state = archive_state(self.using)
        may_move = state.on_for is not None and state.on_for >= UNTIL_FIRST_MOVE
        if not may_move:
            self._moved_to = 0
        if not (state.is_on or state.days):
            return None
        days = ages_of().get(TaskStatus.SUCCESSFUL)
        try:
            if days is not None and state.days and now >= self._drop_at:
                self._drop_at = now + BETWEEN_DROPS
                self._drop(days)
            if may_move:
                self._move(days)
        except DatabaseError as error:
            if getattr(error.__cause__, "sqlstate", None) != NO_RIGHT:
                raise
            self._moved_to = 0
            self._say("rights", "Finished tasks are not moved to the archive: %s", str(error).strip().splitlines()[0])
        if not self._moved_to:
            return None
        self._check_at = time.monotonic() + BETWEEN_BATCHES
        return BETWEEN_BATCHES

    def _has_no_references(self) -> bool:
        """Return whether no table of the project refers to tasks. A foreign key could refuse or cascade a deletion."""
        tables = references_to_tasks(self.using)
        if tables:
            text = "Finished tasks are not moved to the archive: %s has a foreign key to tasks."
            self._say("references", text, ", ".join(tables))
        else:
            self._logged.discard("references")
        return not tables

    def _move(self, days: float | None) -> None:
        # Not if pruning deletes tasks before they are old enough for the archive.
        is_kept = days is None or days * DAY > AGE
        if not (is_kept and self._has_no_references()):
            self._moved_to = 0
            return
        end = time.monotonic() + TIME_TO_MOVE
        while True:
            batch, self._batch = self._batch, max(1, self._batch // 10)
            _, self._moved_to = archive_window(self.using, self._moved_to, days, batch=batch)
            self._batch = min(MOVED_AT_ONCE, batch * 2)
            self._logged.discard("rights")
            if not self._moved_to or time.monotonic() >= end:
                return

    def _drop(self, days: float) -> None:
        for day in drop_days(self.using, days):
            logger.info("The archive's day %s was dropped: all its tasks are older than PRUNE_AFTER allows.", day)

    def _say(self, reason: str, text: str, *values: object) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning(text, *values)
