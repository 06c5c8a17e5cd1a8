"""The processes of the soak: a server, workers with different roles, and a proxy in front of one of them."""

from __future__ import annotations

import os
import signal

from django_pglock.models import Worker
from qa.chaos.experiment import ChaosWorker, Experiment, begins
from qa.processes import children_of
from tests.conftest import wait_until
from tests.proxy import Proxy

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
        return list(Worker.objects.filter(pid__in=forked_by(self.several)))

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
        wait_until(lambda: victim.pid not in forked_by(self.several), "the killed child is still there")
        wait_until(lambda: len(self.siblings()) == PROCESSES, "the killed child was not replaced")

    def wait_until_all_work(self, since: float) -> None:
        """Wait until each worker has begun a task since a moment."""
        wait_until(lambda: self._all_work(since), "some worker does not work again")

    def _all_work(self, since: float) -> bool:
        siblings = {each.pk for each in self.siblings()}
        workers = siblings.union(worker.id for worker in self.workers())
        return len(siblings) == PROCESSES and workers <= {id_ for id_, _ in begins(since)}


def forked_by(worker: ChaosWorker) -> list[int]:
    """Return the children of a worker, which its starter has forked."""
    return [child for starter in children_of(worker.process.pid) for child in children_of(starter)]
