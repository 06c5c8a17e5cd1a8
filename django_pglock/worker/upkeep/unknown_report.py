"""Reporting tasks that no living worker knows: their module is imported nowhere, or their deploy is still to come."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING
from uuid import UUID

from django.apps import apps

if TYPE_CHECKING:
    from django_pglock.store.managers import TaskQuerySet, UnknownTasks

logger = logging.getLogger("django_pglock.worker")

#: Seconds between two looks. The first one waits as long, so that workers that start together have said what they know.
BETWEEN_LOOKS = 30.0


class UnknownReport:
    """Warns once of each function; again when its tasks were gone and are back. Of all workers, the eldest looks."""

    def __init__(self, rows: TaskQuerySet, worker: UUID) -> None:
        self.rows = rows
        self.worker = worker
        self._looked_at = time.monotonic()
        self._reported: set[str] = set()

    def look(self) -> None:
        """Look for such tasks, if it is time to."""
        if time.monotonic() - self._looked_at < BETWEEN_LOOKS:
            return
        self._looked_at = time.monotonic()
        workers = apps.get_model("django_pglock", "Worker").objects.using(self.rows.db)
        if workers.is_eldest(self.worker):
            self._report(self.rows.unknown())

    def _report(self, found: list[UnknownTasks]) -> None:
        for each in found:
            if each.task_path not in self._reported:
                self._reported.add(each.task_path)
                logger.warning(
                    "%s of queue %r %s %r, which no running worker knows: "
                    "is its module imported, or its deploy still to come?",
                    "1 task" if each.waiting == 1 else f"{each.waiting} tasks",
                    each.queue,
                    "calls" if each.waiting == 1 else "call",
                    each.task_path,
                )
        self._reported &= {each.task_path for each in found}
