"""Reports tasks of functions that no living worker knows: not imported anywhere, or part of a later deployment."""

from __future__ import annotations

import time
from uuid import UUID

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.liveness import is_oldest
from django_pglock.store.unknown import UnknownTasks, unknown

logger = get_logger(WORKER)

#: Seconds between two checks, and before the first one. By then, workers that start together have written which
#: functions they know.
CHECK_INTERVAL = 30.0


class UnknownReport:
    """Warns once about each function, and again after its tasks were gone. Only the oldest of all workers checks."""

    def __init__(self, using: str, worker: UUID) -> None:
        self.using = using
        self.worker = worker
        self._checked_at = time.monotonic()
        self._reported: set[str] = set()

    def run_if_due(self) -> None:
        """Check for such tasks, if this is due."""
        if time.monotonic() - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = time.monotonic()
        if is_oldest(self.using, self.worker):
            self._report(unknown(self.using))

    def _report(self, found: list[UnknownTasks]) -> None:
        for each in found:
            if each.task_path not in self._reported:
                self._reported.add(each.task_path)
                logger.warning(
                    "%s of queue %r %s %r, which no running worker has imported. "
                    "Import its module in the workers, or deploy the version that defines it.",
                    "1 task" if each.waiting == 1 else f"{each.waiting} tasks",
                    each.queue,
                    "calls" if each.waiting == 1 else "call",
                    each.task_path,
                )
        self._reported &= {each.task_path for each in found}
