"""``manage.py demo --durable``: one task of several steps, whose worker is killed between them and within them."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.contrib.auth.models import User

from django_pglock import emit
from django_pglock.models import Step, Task
from example_project.demo.evidence import Finding
from example_project.demo.processes import Fleet
from example_project.demo.screen import Screen, times
from example_project.demo.shoppers import SHOPPER
from example_project.shop import tasks
from example_project.shop.models import CreditEntry, Effect

#: Seconds for which the demo waits for one thing.
LONGEST = 60.0
ORDER = 7
STEPS = ["charge", "reserve", "night", f"packed:{ORDER}", "label", "ship"]


@dataclass
class Report:
    """The results of a run."""

    seconds: float = 0.0
    kills: int = 0
    charges: int = 0
    #: How often the function of each step without a transaction has run.
    runs: dict[str, int] = field(default_factory=dict)
    recorded: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every claim holds."""
        return all(finding.holds for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**self.__dict__, "findings": [finding.as_dict() for finding in self.findings], "holds": self.holds}


class Durable:
    """One run of the demo."""

    def __init__(self, screen: Screen, fleet: Fleet) -> None:
        self.screen = screen
        self.fleet = fleet
        self.report = Report()

    def run(self) -> Report:
        """Run the demo and return the results."""
        began = time.monotonic()
        shopper = User.objects.create(username=SHOPPER, password="!")
        self.id = int(tasks.process_order.enqueue(shopper.pk, ORDER).id)
        self.screen.say(f"Task {self.id} processes an order: charge, reserve, sleep, wait for the parcel, label, ship.")
        self.kill("charge", "within the step that charges the card", self.is_running)
        self.kill("between", "between two steps", lambda: "charge" in self.records())
        self.kill("reserve", "within the step that reserves", lambda: ran("reserve"))
        self.kill("night", "while the task sleeps", lambda: "night" in self.records() and not self.is_running())
        self.kill("wait", "while the task waits for the parcel", lambda: STEPS[3] in self.records())
        emit(STEPS[3], {"parcel": 1})
        self.screen.say(f"The parcel is packed: the event {STEPS[3]} was emitted.")
        self.kill("ship", "within the step that ships", lambda: "label" in self.records())
        self.wait(self.start(), lambda: Task.objects.filter(pk=self.id, finished_at__isnull=False).exists())
        self.look_at_what_is_left()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def start(self) -> subprocess.Popen[bytes]:
        """Start a worker."""
        return self.fleet.start("runlockworker", "--no-reload")

    def kill(self, where: str, when: str, is_time: Callable[[], object]) -> None:
        """Start a worker, kill it when it is time, and note where: there, the task does not wait any more."""
        worker = self.start()
        self.wait(worker, is_time)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        Effect.objects.create(kind=f"killed {where}", number=ORDER, pid=worker.pid)
        self.report.kills += 1
        self.screen.say(f"Worker {self.report.kills} (process {worker.pid}) was killed {when}.")

    def wait(self, worker: subprocess.Popen[bytes], is_true: Callable[[], object]) -> None:
        """Wait until something is true. Raises ``TimeoutError`` when it never is."""
        deadline = time.monotonic() + LONGEST
        while not is_true():
            self.fleet.require_running(worker)
            if time.monotonic() > deadline:
                raise TimeoutError(f"The task did not come so far: {self.records()}\n{self.fleet.output()}")
            time.sleep(0.02)

    def is_running(self) -> bool:
        """Return whether a worker has the task now."""
        return Task.objects.filter(pk=self.id, status="RUNNING").exists()

    def records(self) -> list[str]:
        """Return the names of the recorded steps, in order."""
        return list(Step.objects.filter(task=self.id).order_by("number").values_list("name", flat=True))

    def look_at_what_is_left(self) -> None:
        """Ask the database."""
        report, task = self.report, Task.objects.get(pk=self.id)
        report.recorded = self.records()
        report.charges = CreditEntry.objects.filter(amount__lt=0).count()
        effects = Effect.objects.exclude(kind__startswith="killed").order_by("pk")
        report.runs = dict(Counter(effects.values_list("kind", flat=True)))
        report.findings = [
            Finding("The task ended successfully", int(task.status != "SUCCESSFUL")),
            Finding("Each step is recorded once, in its order", int(report.recorded != STEPS)),
            Finding("The card was charged once", abs(report.charges - 1)),
            Finding("The order was shipped once", abs(report.runs.get("ship", 0) - 1)),
            Finding("A step whose worker was not killed ran once", abs(report.runs.get("label", 0) - 1)),
            Finding("A plain step whose worker was killed ran twice", abs(report.runs.get("reserve", 0) - 2)),
            Finding("No attempt was spent on a killed worker", task.retries),
        ]


def ran(step: str) -> int:
    """Return how often the function of a step has begun."""
    return Effect.objects.filter(kind=step, number=ORDER).count()


def show(screen: Screen, report: Report) -> None:
    """Show the evidence."""
    repeated = [f"{step} ran {times(count)}" for step, count in report.runs.items() if count > 1]
    screen.say(
        f"\n{report.kills} workers were killed. The card was charged {times(report.charges)}; of the steps without a "
        f"transaction, {', '.join(repeated) or 'none ran twice'}.\n\nAsked of the database:"
    )
