"""A client: it enqueues tasks of each kind, notes the result of each commit, and holds a lock."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from django.db import Error as DatabaseFailure
from django.db import connection, transaction

from django_pglock import LockLost, lock
from tests.sample import chaos_tasks, soak_tasks

#: Seconds between two transactions, or two attempts to connect.
PAUSE = 0.2
KEYS = 4


@dataclass
class Written:
    """What one transaction has enqueued, and when. ``once`` may be the id of a task from before."""

    ids: list[int]
    once: int
    at: float = field(default_factory=time.time)


class Client:
    """Works from its start until its end, in two threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.committed: list[Written] = []
        #: Those whose COMMIT has failed: they may be there or not.
        self.unknown: list[Written] = []
        self.losses = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=each) for each in (self._enqueue_often, self._hold_a_lock)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _enqueue_often(self) -> None:
        number = 0
        while not self._over.wait(PAUSE):
            number += 1
            self._enqueue(number)
        connection.close()

    def _enqueue(self, number: int) -> None:
        """Enqueue one task of each kind in one transaction."""
        written: Written | None = None
        try:
            with transaction.atomic():
                results = [
                    chaos_tasks.work.enqueue(0.02),
                    chaos_tasks.work_atomically.enqueue(0.02),
                    chaos_tasks.work_alone.enqueue(str(number % KEYS), 0.02),
                    soak_tasks.work_in_coroutine.enqueue(0.02),
                ]
                # The id of a task that exists already, if one with this unique key is not finished.
                once = soak_tasks.work_once.enqueue(number % KEYS, 0.02)
                written = Written([int(result.id) for result in results], int(once.id))
        except DatabaseFailure:
            self.unknown += [written] if written else []
            connection.close()
        else:
            self.committed += [written] if written else []

    def _hold_a_lock(self) -> None:
        """Hold a session lock forever, and count how often its loss is reported."""
        while not self._over.is_set():
            try:
                with lock(self.name) as held:
                    while not self._over.wait(PAUSE):
                        held.assert_held()
            except LockLost:
                self.losses += 1
            except DatabaseFailure:  # no server takes writes yet
                self._over.wait(PAUSE)
            connection.close()
