"""Workers and clients on a pair of servers, and the judgement of what they have written down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from django.db import Error as DatabaseFailure
from django.db import connection

from django_pglock.models import Attempt, Task
from qa.chaos.experiment import Experiment
from qa.servers.switch_over.pair import Pair, wait_until
from tests.conftest import NEVER, ROOT
from tests.sample.models import Run
from tests.warm.process import start

CLIENTS = WORKERS = 2
#: Runs of each worker and commits of each client before the next switch.
ENOUGH = 3


class Rounds:
    """One session of switches. As a context manager it starts and ends the processes."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self._pair = pair
        self._experiment = Experiment(pair.primary, "switch-over", [], is_short=True)
        self._journals = [folder / f"client-{number}" for number in range(CLIENTS)]
        self._clients: list[subprocess.Popen[bytes]] = []
        self._switches = 0

    def __enter__(self) -> Rounds:
        module = os.environ["DJANGO_SETTINGS_MODULE"]
        self._workers = self._experiment.workers(WORKERS, "--threads", "3", DJANGO_SETTINGS_MODULE=module)
        self._pair.replicate_synchronously()
        command = [sys.executable, "-m", "qa.servers.switch_over.client"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._clients = [start([*command, str(journal)], cwd=ROOT, env=environment) for journal in self._journals]
        return self

    def __exit__(self, *error: object) -> None:
        self._end_clients()
        self._experiment.close()
        connection.close()

    def _end_clients(self) -> None:
        for client in self._clients:
            client.terminate()
        for client in self._clients:
            client.wait(NEVER)
        self._clients = []

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
            wait_until(_answered(partial(_runs, worker.id, since)), f"a worker does not work:\n{worker.output[-5000:]}")
        for journal in self._journals:
            wait_until(partial(_commits, journal, since), f"a client does not commit: {journal}")

    def findings(self) -> list[str]:
        """End the load, wait for the end of all tasks, and return everything that should not be."""
        self._end_clients()
        wait_until(_answered(self._experiment.is_over), "some task is never finished")
        committed, unknown = self._enqueued()
        self._experiment.enqueued = [each for ids in committed for each in (*ids["ids"], *ids["once"])]
        findings = [str(finding) for finding in self._experiment.evidence().findings()]
        new = [each for ids in committed for each in ids["ids"]]
        findings += [f"{len(new) - len({*new})} ids were given twice"] * (len(new) > len({*new}))
        findings += [f"a part of a transaction exists: {ids}" for ids in unknown if _is_partly_there(ids["ids"])]
        findings += [f"worker {worker.id} has ended" for worker in self._workers if worker.ended_at is not None]
        reported = [sum(not line["held"] for line in _lines(Path(f"{each}.lock"))) for each in self._journals]
        findings += [
            f"{self._switches} locks were lost, {each} losses reported" for each in reported if each < self._switches
        ]
        return findings

    def _enqueued(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return what was enqueued in transactions that were committed, and in those whose COMMIT has failed."""
        committed, unknown = [], []
        for journal in self._journals:
            begun: dict[str, Any] | None = None
            for line in _lines(journal):
                if "ids" in line:
                    begun = line
                elif begun:
                    (committed if line["committed"] else unknown).append(begun)
                    begun = None
        return committed, unknown

    def summary(self) -> str:
        """Return how much was running."""
        committed, unknown = self._enqueued()
        there = sum(Task.objects.filter(pk__in=each["ids"]).exists() for each in unknown)
        lost, tasks = Attempt.objects.filter(outcome="LOST").count(), Task.objects.count()
        return (
            f"{len(committed)} transactions committed; COMMIT failed for {len(unknown)}, {there} of which exist; "
            f"{tasks} tasks, {lost} attempts cut off"
        )


def _answered(question: Callable[[], Any]) -> Callable[[], Any]:
    """Return a question that is answered by no while no server answers."""

    def ask() -> Any:
        try:
            return question()
        except DatabaseFailure:
            connection.close()
            return False

    return ask


def _runs(worker: Any, since: float) -> bool:
    starts = Run.objects.filter(worker=worker).order_by("-started_at").values_list("started_at", flat=True)[:ENOUGH]
    return len(starts) == ENOUGH and min(starts).timestamp() >= since


def _commits(journal: Path, since: float) -> bool:
    return sum(line.get("committed", False) and line["at"] >= since for line in _lines(journal)) >= ENOUGH


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    # The last line may be half written.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _is_partly_there(ids: list[int]) -> bool:
    return Task.objects.filter(pk__in=ids).count() not in (0, len(ids))
