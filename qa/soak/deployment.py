"""The processes of the soak: a server, workers with different roles, and a proxy in front of one of them."""

from __future__ import annotations

import os
import signal
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
    """Workers by their role. ``steady`` is never harmed."""

    def __init__(self, experiment: Experiment, proxy: Proxy) -> None:
        self.experiment = experiment
        self.server = experiment.server
        self.proxy = proxy
        # Each worker is started before another one is waited for: they start side by side.
        self.steady, *self.victims = self.experiment.workers(3, "--threads", "3", pglock=PGLOCK)
        # Only their timeout ends what its tasks wait for where the proxy has forgotten their connections.
        self.distant = self.experiment.worker(
            "--threads", "3", url=proxy.url("postgres"), pglock=PGLOCK, CHAOS_TIMEOUT="15"
        )
        self.several = self.experiment.start("--processes", str(PROCESSES), "--threads", "2", pglock=PGLOCK)
        wait_until(lambda: len(self.siblings()) == PROCESSES, "the worker has not started its children")

    def siblings(self) -> list[Worker]:
        """Return the children of the worker that has several."""
        return list(Worker.objects.filter(pid__in=children_of(self.several)))

    def workers(self) -> list[ChaosWorker]:
        """Return the workers that are processes of their own."""
        return [self.steady, *self.victims, self.distant]

    def replace(self, victim: ChaosWorker) -> None:
        """Start a worker in place of a worker that ends, and wait until the old one has ended."""
        assert victim.start_replacement is not None
        start, victim.start_replacement = victim.start_replacement, None
        self.victims[self.victims.index(victim)] = start()
        victim.wait()

    def kill_child(self) -> None:
        """Kill one of several children and wait for its successor."""
        victim = self.siblings()[0]
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: victim.pid not in children_of(self.several), "the killed child is still there")
        wait_until(lambda: len(self.siblings()) == PROCESSES, "the killed child was not replaced")

    def wait_until_all_work(self, since: float) -> None:
        """Wait until each worker has begun a task since a moment."""
        for worker in self.workers():
            wait_until(partial(_has_begun, worker.id, since), f"{worker.id} does not work again")
        wait_until(lambda: self._all_siblings_work(since), "the children do not work again")

    def _all_siblings_work(self, since: float) -> bool:
        workers = self.siblings()
        return len(workers) == PROCESSES and all(_has_begun(each.pk, since) for each in workers)


def children_of(worker: ChaosWorker) -> list[int]:
    """Return the children of a worker, which its starter has forked."""
    return [child for starter in _processes_below(worker.process.pid) for child in _processes_below(starter)]


def _processes_below(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def _has_begun(worker: Any, since: float) -> bool:
    latest = Run.objects.filter(worker=worker).order_by("-started_at").first()
    return latest is not None and latest.started_at.timestamp() >= since
