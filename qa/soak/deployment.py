"""The processes of the soak: a server, workers with different roles, and a proxy in front of one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from django_pglock.models import Worker
from qa.chaos.experiment import ChaosWorker, Experiment
from tests.conftest import wait_until
from tests.proxy import Proxy
from tests.sample.models import Run

#: Days after which finished tasks are deleted: ten minutes, so that the tables reach their usual size soon.
PGLOCK = {"PRUNE_AFTER": {"SUCCESSFUL": 10 / 1440, "CANCELLED": 10 / 1440}}
PROCESSES = 2
#: Seconds after which something counts as never happening. Others may use the machine, too.
LIMIT = 600.0


class Deployment:
    """Workers by their role. ``steady`` is never harmed, so a leak of memory or of sessions shows there."""

    def __init__(self, experiment: Experiment, proxy: Proxy) -> None:
        self.experiment = experiment
        self.server = experiment.server
        self.proxy = proxy
        # Each worker is started before another one is waited for: they start side by side.
        self.steady, *self.victims = self.experiment.workers(3, "--threads", "3", pglock=PGLOCK)
        self.distant = self.experiment.worker("--threads", "3", url=proxy.url("postgres"), pglock=PGLOCK)
        self.supervisor = self.experiment.start("--processes", str(PROCESSES), "--threads", "2", pglock=PGLOCK)
        wait_until(lambda: len(self.supervised()) == PROCESSES, "the supervisor has not started its processes")

    def supervised(self) -> list[Worker]:
        """Return the workers that are processes of the supervisor."""
        return list(Worker.objects.filter(pid__in=self._pids()))

    def _pids(self) -> list[int]:
        return children_of(self.supervisor.process.pid)

    def workers(self) -> list[ChaosWorker]:
        """Return the workers that are processes of their own."""
        return [self.steady, *self.victims, self.distant]

    def roles(self) -> Iterator[tuple[str, int]]:
        """Yield the role and the process id of each process."""
        yield "steady worker", self.steady.process.pid
        yield from (("worker that is killed", victim.process.pid) for victim in self.victims)
        yield "worker behind the proxy", self.distant.process.pid
        yield "supervisor", self.supervisor.process.pid
        yield from (("process of the supervisor", pid) for pid in self._pids())

    def replace(self, victim: ChaosWorker) -> None:
        """Start a worker in place of a worker that ends, and wait until the old one has ended."""
        assert victim.start_replacement is not None
        start, victim.start_replacement = victim.start_replacement, None
        self.victims[self.victims.index(victim)] = start()
        victim.wait()

    def kill_supervised(self) -> None:
        """Kill one process of the supervisor and wait for its successor."""
        victim = self.supervised()[0]
        os.kill(victim.pid, signal.SIGKILL)
        self.experiment.out_of_reach(victim.pk, time.time(), float("inf"))
        wait_until(
            lambda: victim.pid not in children_of(self.supervisor.process.pid), "the killed process is still there"
        )
        wait_until(lambda: len(self.supervised()) == PROCESSES, "the killed process was not replaced")

    def wait_until_all_work(self, since: float) -> None:
        """Wait until each worker has begun a task since a moment."""
        for worker in self.workers():
            wait_until(partial(_has_begun, worker.id, since), f"{worker.id} does not work again")
        wait_until(lambda: self._all_supervised_work(since), "the processes of the supervisor do not work again")

    def _all_supervised_work(self, since: float) -> bool:
        workers = self.supervised()
        return len(workers) == PROCESSES and all(_has_begun(each.pk, since) for each in workers)


def children_of(pid: int) -> list[int]:
    """Return the worker processes that a process has started. Heartbeat processes are no workers."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in children if "heartbeat_process" not in _command(child)]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _has_begun(worker: Any, since: float) -> bool:
    latest = Run.objects.filter(worker=worker).order_by("-started_at").first()
    return latest is not None and latest.started_at.timestamp() >= since
