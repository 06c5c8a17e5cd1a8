"""Workers and clients on a pair of servers, and the judgement of what they have written down."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

from django.db import connection

from django_pglock.models import Attempt, Task
from qa.chaos.experiment import Experiment
from qa.servers.switch_over.client import Client, Written
from qa.servers.switch_over.pair import Pair
from tests.conftest import wait_until
from tests.sample.models import Run

CLIENTS = WORKERS = 2
#: Runs of each worker and commits of each client before the next switch.
ENOUGH = 3


class Rounds:
    """One session of switches. As a context manager it starts and ends workers and clients."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._experiment = Experiment(pair.primary, "switch-over", [], is_short=True)
        self._clients: list[Client] = []
        self._switches = 0

    def __enter__(self) -> Rounds:
        module = os.environ["DJANGO_SETTINGS_MODULE"]
        self._workers = self._experiment.workers(WORKERS, "--threads", "3", DJANGO_SETTINGS_MODULE=module)
        self._pair.replicate_synchronously()
        self._clients = [Client(f"client-{number}") for number in range(CLIENTS)]
        return self

    def __exit__(self, *error: object) -> None:
        self._end_clients()
        self._experiment.close()
        connection.close()

    def _end_clients(self) -> None:
        for client in self._clients:
            client.end()

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
        for worker in self._workers:
            wait_until(partial(_runs, worker.id, since), f"a worker does not work:\n{worker.output[-5000:]}")
        for client in self._clients:
            wait_until(partial(_commits, client, since), f"{client.name} does not commit")

    def findings(self) -> list[str]:
        """End the load, wait for the end of all tasks, and return everything that should not be."""
        self._end_clients()
        wait_until(self._experiment.is_over, "some task is never finished")
        committed, unknown = self._enqueued()
        new = [id_ for each in committed for id_ in each.ids]
        self._experiment.enqueued = [*new, *(each.once for each in committed)]
        findings = [str(finding) for finding in self._experiment.evidence().findings()]
        findings += [f"{len(new) - len({*new})} ids were given twice"] * (len(new) > len({*new}))
        findings += [f"a part of a transaction exists: {each.ids}" for each in unknown if _is_partly_there(each.ids)]
        findings += [f"worker {worker.id} has ended" for worker in self._workers if worker.ended_at is not None]
        findings += [
            f"{self._switches} locks were lost, {client.losses} losses reported"
            for client in self._clients
            if client.losses < self._switches
        ]
        return findings

    def _enqueued(self) -> tuple[list[Written], list[Written]]:
        """Return what was enqueued in transactions that were committed, and in those whose COMMIT has failed."""
        committed = [each for client in self._clients for each in client.committed]
        return committed, [each for client in self._clients for each in client.unknown]

    def summary(self) -> str:
        """Return how much was running."""
        committed, unknown = self._enqueued()
        lost, tasks = Attempt.objects.filter(outcome="LOST").count(), Task.objects.count()
        return (
            f"{len(committed)} transactions committed; COMMIT failed for {len(unknown)}; "
            f"{tasks} tasks, {lost} attempts cut off"
        )


def _runs(worker: Any, since: float) -> bool:
    starts = Run.objects.filter(worker=worker).order_by("-started_at").values_list("started_at", flat=True)[:ENOUGH]
    return len(starts) == ENOUGH and min(starts).timestamp() >= since


def _commits(client: Client, since: float) -> bool:
    return sum(each.at >= since for each in client.committed) >= ENOUGH


def _is_partly_there(ids: list[int]) -> bool:
    return Task.objects.filter(pk__in=ids).count() not in (0, len(ids))
