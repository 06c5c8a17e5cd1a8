"""Reports tasks that no living worker runs: of functions that none has imported, and of queues that none serves."""

from __future__ import annotations

import time
from uuid import UUID

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.liveness import is_oldest
from django_pglock.store.unknown import UnknownTasks, unknown, unserved_queues

logger = get_logger(WORKER)

#: Seconds between two checks, and before the first one. By then, workers that start together have written which
#: functions they know.
CHECK_INTERVAL = 30.0


class UnknownReport:
    """Warns once about each function and queue, and again after its tasks were gone. Only the oldest worker checks."""

    def __init__(self, using: str, worker: UUID) -> None:
        self.using = using
        self.worker = worker
        self._checked_at = time.monotonic()
        self._reported: set[str] = set()
        self._reported_queues: set[str] = set()

    def run_if_due(self) -> None:
        """Check for such tasks, if this is due."""
        if time.monotonic() - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = time.monotonic()
        if is_oldest(self.using, self.worker):
            self._report(unknown(self.using))
            self._report_queues(set(unserved_queues(self.using)))

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

    def _report_queues(self, found: set[str]) -> None:
        for queue in sorted(found - self._reported_queues):
            logger.warning(
                "Tasks wait in the queue %r, which no running worker serves. Start a worker for it, or move them: "
                "manage.py locktasks move-to-queue --queue %s --to OTHER",
                queue,
                queue,
            )
        self._reported_queues = found
