"""Workers, a load and the holder of a lock on a pair of servers, and the judgement of what they have written."""

from __future__ import annotations

import os
import threading
import time

from django.db import Error as DatabaseFailure
from django.db import connection

from django_pglock import LockLost, lock
from django_pglock.models import Attempt, Task
from qa.chaos.experiment import Experiment, begins
from qa.servers.switch_over.pair import Pair
from qa.soak.judge import Judge
from qa.soak.load import Load
from tests.conftest import wait_until

WORKERS = 2
#: Commits before the next switch.
ENOUGH = 3


class Holder(threading.Thread):
    """Holds a session lock forever, and counts how often its loss is reported."""

    def __init__(self) -> None:
        super().__init__(name="holder", daemon=True)
        self.losses = 0
        self._end = threading.Event()

    def stop(self) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        while not self._end.is_set():
            try:
                with lock("switch-over") as held:
                    while not self._end.wait(0.2):
                        held.assert_held()
            except LockLost:
                self.losses += 1
            except DatabaseFailure:  # no server takes writes yet
                self._end.wait(0.2)
            connection.close()


class Rounds:
    """One session of switches. As a context manager it starts and ends workers and their load."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._experiment = Experiment(pair.primary, "switch-over", [], is_short=True)
        self._load, self._holder = Load(seed=1), Holder()
        self._switches = 0

    def __enter__(self) -> Rounds:
        module = os.environ["DJANGO_SETTINGS_MODULE"]
        self._workers = self._experiment.workers(WORKERS, "--threads", "3", DJANGO_SETTINGS_MODULE=module)
        self._pair.replicate_synchronously()
        self._load.start()
        self._holder.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end_load()
        self._experiment.close()
        connection.close()

    def _end_load(self) -> None:
        self._load.stop()
        self._holder.stop()

    def switch(self, number: int, *, power_off: bool) -> str:
        """Make the old primary a standby again, switch under load, and wait until all work on the new primary."""
        if self._switches:
            self._pair.rejoin()
        self._wait_until_all_work(time.time())
        began = time.time()
        self._pair.switch(power_off=power_off)
        promoted = time.time()
        self._switches += 1
        self._wait_until_all_work(promoted)
        working = time.time()
        how = "power off" if power_off else "in order"
        return (
            f"{number:2} {how:9}  promoted after {promoted - began:4.1f} s, all work {working - promoted:4.1f} s later"
        )

    def _wait_until_all_work(self, since: float) -> None:
        before = self._load.commits
        wait_until(lambda: self._load.commits >= before + ENOUGH, "nothing is committed")
        workers = {worker.id for worker in self._workers}
        wait_until(lambda: workers <= {id_ for id_, _ in begins(since)}, "a worker does not work")

    def findings(self) -> list[str]:
        """End the load, wait for the end of all tasks, and return everything that should not be."""
        self._end_load()
        _, findings = Judge().judge(self._load.take(), self._experiment)
        findings += [f"worker {worker.id} has ended" for worker in self._workers if worker.ended_at is not None]
        if self._holder.losses < self._switches:
            findings.append(f"{self._switches} locks were lost, {self._holder.losses} losses reported")
        return findings

    def summary(self) -> str:
        """Return how much was running."""
        lost, tasks = Attempt.objects.filter(outcome="LOST").count(), Task.objects.count()
        return (
            f"{self._load.commits} transactions committed, {self._load.failures} failed; "
            f"{tasks} tasks, {lost} attempts cut off"
        )
