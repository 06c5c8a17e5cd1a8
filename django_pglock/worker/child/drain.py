"""``--drain``: a worker ends when no task is left that it could run. It logs the tasks that it leaves behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID

from django.db import transaction

from django_pglock.conf import get_settings
from django_pglock.error_reading import one_line
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.admit import admit, blocked_keys
from django_pglock.store.liveness import try_upkeep_lock
from django_pglock.store.ready import next_due_in, paused_queues, unknown
from django_pglock.store.release import promote
from django_pglock.store.rescue import possibly_lost
from django_pglock.tasks import registry
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.queues import Queues

logger = get_logger(WORKER)

#: Seconds between two queries for tasks of workers that may be dead.
CHECK_INTERVAL = 0.5
#: The number of heartbeat intervals to wait for a rescue beyond HEARTBEAT_LIMIT: another worker must become a witness,
#: and do rounds of upkeep.
MARGIN = 5


@dataclass(eq=False)
class Drain:
    """What a draining worker waits for before it ends, and what it leaves behind.

    ``queues`` and ``backend`` are those that the worker serves. ``end`` is called when the worker must end. Then
    ``left_behind`` has, in words, the tasks that the worker should have run and that perhaps no worker will run.
    """

    using: str
    queues: Queues
    worker: UUID
    end: Callable[[], None]
    backend: str | None = None
    left_behind: list[str] = field(default_factory=list)
    _waits_since: float | None = None
    _queried_at: float = -CHECK_INTERVAL
    _possibly_lost: dict[str, int] = field(default_factory=dict)

    def is_last_poll(self, in_flight: InFlight) -> bool:
        """Promote due tasks, and admit to lock keys. Return whether nothing is in flight and no task was due."""
        if in_flight.claims or self._waits_for_rescue():
            return False
        due_in = next_due_in(self.using)
        if due_in is not None and due_in <= 0:
            with transaction.atomic(using=self.using):
                # Not beside a round of upkeep: each would skip what the other has locked, and the younger of two tasks
                # of a lock key could be admitted first.
                if try_upkeep_lock(self.using):
                    promote(self.using)
            return False
        # Another worker may have promoted tasks, and not yet admitted the first task of each key.
        admit(self.using, blocked_keys(self.using, ""))
        return True

    def _waits_for_rescue(self) -> bool:
        """Return whether tasks run on workers that may be dead. They are rescued soon, or their workers beat again."""
        now = time.monotonic()
        if now - self._queried_at >= CHECK_INTERVAL:
            self._queried_at = now
            found = possibly_lost(self.using, backend=self.backend)
            self._possibly_lost = {queue: count for queue, count in found if self.queues.serves(queue)}
        if not self._possibly_lost:
            self._waits_since = None
            return False
        self._waits_since = self._waits_since or now
        settings = get_settings()
        return now - self._waits_since < settings.HEARTBEAT_LIMIT + MARGIN * settings.HEARTBEAT_INTERVAL

    def give_up(self, error: BaseException) -> None:
        """End the worker because its role lacks a right. A cron job must not wait until the right is granted."""
        if not self.left_behind:
            self.left_behind = ["what it may not claim"]
            text = "This worker ends, because its role lacks a right: %s. docs/security.md lists what it needs."
            logger.error(text, one_line(error))
            self.end()

    def finish(self) -> None:
        """Log what the worker leaves behind, then end it."""
        self.left_behind = [
            f"{_tasks(count)} of queue {queue!r} that {'runs' if count == 1 else 'run'} on a worker that may be dead"
            for queue, count in sorted(self._possibly_lost.items())
        ]
        paused, known = paused_queues(self.using), registry.known_paths()
        self.left_behind += [
            f"{_tasks(each.waiting)} of queue {each.queue!r} that {'calls' if each.waiting == 1 else 'call'} "
            f"{each.task_path!r}, which this worker does not know"
            for each in unknown(self.using, worker=self.worker, backend=self.backend)
            if self.queues.serves(each.queue) and each.queue not in paused and each.task_path not in known
        ]
        for what in self.left_behind:
            logger.error("This worker has no more tasks to run. It leaves %s.", what)
        self.end()


def _tasks(count: int) -> str:
    return "1 task" if count == 1 else f"{count} tasks"
