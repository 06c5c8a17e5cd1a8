"""A mixed load of tasks at a steady rate. It continues through every fault, as the clients of a real project do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.db import Error as DatabaseFailure
from django.db import connection, transaction
from django.utils import timezone

from django_pglock.models import Task
from tests.sample import chaos_tasks, soak_tasks

#: Tasks of one transaction, and transactions in a second.
BATCH, BATCHES = 25, 2
KEYS = 40


@dataclass
class Enqueued:
    """The tasks that were enqueued since the last call."""

    #: Committed, so each of them has to end.
    committed: list[int] = field(default_factory=list)
    #: COMMIT has failed: these may exist or not.
    unknown: list[int] = field(default_factory=list)
    #: Cancelled before they were due.
    cancelled: list[int] = field(default_factory=list)
    #: For each task of a group its serial number, under which its effect is written.
    serials: dict[int, int] = field(default_factory=dict)


class Load(threading.Thread):
    """Enqueue one batch after the other until ``stop()``."""

    def __init__(self, seed: int) -> None:
        super().__init__(name="load", daemon=True)
        self._random = random.Random(seed)
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._now = Enqueued()
        self._serial = 0
        #: Batches that were enqueued; and those that were not, because the database could not be reached or refused it.
        self.commits = self.failures = 0

    def stop(self) -> None:
        """End the load."""
        self._end.set()
        self.join()

    def take(self) -> Enqueued:
        """Return what was enqueued since the last call."""
        with self._lock:
            taken, self._now = self._now, Enqueued()
        return taken

    def run(self) -> None:
        """Enqueue. A failure is counted, and the next batch opens another connection."""
        due = time.monotonic()
        while not self._end.wait(due - time.monotonic()):
            # What an outage has kept back is not made up for.
            due = max(due, time.monotonic() - 1) + 1 / BATCHES
            batch = Enqueued()
            try:
                with transaction.atomic():
                    for result in self._enqueue(batch):
                        batch.committed.append(int(result.id))
            except DatabaseFailure:
                self.failures += 1
                batch = Enqueued(unknown=batch.committed, cancelled=batch.cancelled, serials=batch.serials)
                connection.close()
            else:
                self.commits += 1
            with self._lock:
                for name in ("committed", "unknown", "cancelled"):
                    getattr(self._now, name).extend(getattr(batch, name))
                self._now.serials.update(batch.serials)
        connection.close()

    def _enqueue(self, batch: Enqueued) -> Iterator[Any]:
        """Enqueue some tasks of each kind."""
        for _ in range(6):
            yield chaos_tasks.work.using(priority=self._random.randint(-5, 5)).enqueue(self._seconds())
        for _ in range(4):
            yield chaos_tasks.work_atomically.enqueue(self._seconds())
        for _ in range(4):
            yield chaos_tasks.work_alone.enqueue(str(self._random.randrange(KEYS)), self._seconds())
        for _ in range(2):
            yield soak_tasks.work_in_coroutine.enqueue(self._seconds())
            yield soak_tasks.work_once.enqueue(self._random.randrange(KEYS), self._seconds())
        yield soak_tasks.fail_at_first.enqueue(self._seconds())
        first = chaos_tasks.work.enqueue(self._seconds())
        yield first
        yield chaos_tasks.work.using(after=[first]).enqueue(self._seconds())
        yield chaos_tasks.work.using(run_after=timezone.now() + timedelta(seconds=3)).enqueue(self._seconds())
        for _ in range(2):
            self._serial += 1
            together = soak_tasks.work_together.enqueue(group=self._random.randrange(3), serial=self._serial)
            batch.serials[int(together.id)] = self._serial
            yield together
        yield self._cancelled(batch)

    def _cancelled(self, batch: Enqueued) -> Any:
        result = chaos_tasks.work.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(0)
        assert Task.objects.filter(pk=int(result.id)).cancel() == 1
        batch.cancelled.append(int(result.id))
        return result

    def _seconds(self) -> float:
        """Return how long a task takes: most of them some milliseconds, a few of them a second."""
        return 1.0 if self._random.random() < 0.01 else self._random.uniform(0.002, 0.05)
