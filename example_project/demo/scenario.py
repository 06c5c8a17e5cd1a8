"""The course of the demo: start the shop, send clicks and tasks, kill a worker, check the rows."""

from __future__ import annotations

import signal
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

from django.db import transaction
from django.db.models import Count

from django_pglock.models import Task, Worker
from example_project.demo import evidence, size
from example_project.demo.background import Background
from example_project.demo.processes import Fleet, listen
from example_project.demo.screen import Screen, counted, times
from example_project.demo.shoppers import Rush, make_shoppers, wait_for_shop
from example_project.shop import tasks
from example_project.shop.models import Order

LONGEST = 300.0


@dataclass
class Report:
    """The results of a run."""

    seconds: float = 0.0
    tasks: int = 0
    tasks_per_second: float = 0.0
    latency_p50_ms: float = 0.0
    latency_p95_ms: float = 0.0
    taken_over: int = 0
    takeover_seconds: float = 0.0
    http_answers: dict[str, int] = field(default_factory=dict)
    charges: int = 0
    double_clicks: int = size.CLICKS
    double_click_charges: int = 0
    findings: list[evidence.Finding] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Every claim holds."""
        return all(finding.holds for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Return it for programs."""
        return {**self.__dict__, "findings": [finding.as_dict() for finding in self.findings], "holds": self.holds}


class Scenario:
    """One run of the demo."""

    def __init__(self, screen: Screen, fleet: Fleet) -> None:
        self.screen = screen
        self.fleet = fleet
        self.report = Report()
        #: The port of the shop, once it is open.
        self.port = 0
        self.shop: subprocess.Popen[bytes] | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        self.background: list[Background] = []

    def run(self) -> Report:
        """Run the demo and return the results."""
        began = time.monotonic()
        shoppers = make_shoppers(size.SHOPPERS + 1, gift=1_000, price=30)
        self.open_shop()
        rush = Rush(self.port)
        self.one_impatient_shopper(rush, shoppers[0])
        self.a_busy_day(rush, shoppers[1:])
        self.look_at_what_is_left(rush)
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    def open_shop(self) -> None:
        """Start the server and the workers, and wait until they are ready."""
        with listen() as listener:
            self.port = listener.getsockname()[1]
            self.screen.say(f"The shop opens on http://127.0.0.1:{self.port}/ with {size.WORKERS} worker processes.")
            descriptor = listener.fileno()
            self.shop = server = self.fleet.start(
                "serveshop", str(self.port), "--fd", str(descriptor), pass_fds=[descriptor], CONN_MAX_AGE="0"
            )
        self.workers = [self.fleet.start("runlockworker", "--threads", "4", "--no-reload") for _ in range(size.WORKERS)]
        wait_for_shop(self.port)
        deadline = time.monotonic() + 120
        while Worker.objects.count() < size.WORKERS:
            for process in (server, *self.workers):
                self.fleet.require_running(process)
            if time.monotonic() > deadline:
                raise TimeoutError("The workers did not come.")
            time.sleep(0.05)

    def slow_down_the_bank(self) -> None:
        """Open the shop again, with a bank that leaves a person the time for a second click."""
        assert self.shop is not None
        self.fleet.end(self.shop)
        self.shop = self.fleet.start("serveshop", str(self.port), SHOP_PAYMENT_SECONDS="2")
        wait_for_shop(self.port)

    def one_impatient_shopper(self, rush: Rush, shopper: Any) -> None:
        """A hundred clicks on one button at once."""
        rush.double_clicks(shopper, size.CLICKS)
        self.report.double_click_charges = Order.objects.count()
        self.screen.say(
            f"One shopper pressed the button {size.CLICKS} times at once and was charged "
            f"{times(self.report.double_click_charges)}: {counted(rush.answers[409], 'answer')} with 409, and "
            f"{counted(rush.answers[200] - 1, 'click')} came later and got the same order."
        )

    def a_busy_day(self, rush: Rush, shoppers: list[Any]) -> None:
        """Shoppers and tasks at the same time, and one worker killed in the middle."""
        self.screen.say(
            f"{size.SHOPPERS} others buy, {size.tasks():,} tasks come in, and one worker is going to be killed."
        )
        self.background = [Background(rush.stream, shoppers, carts=size.CARTS), Background(self.enqueue)]
        began = time.monotonic()
        self.watch(began, until=lambda counts: counts.get("SUCCESSFUL", 0) > size.tasks() * 0.4)
        killed_at = self.kill_one()
        self.watch(began, until=lambda counts: counts["taken_over"] > 0)
        self.report.takeover_seconds = round(time.monotonic() - killed_at, 1)
        for work in self.background:
            work.finish(LONGEST)
        self.watch(began, until=_is_all_done, is_last=True)
        self.report.tasks_per_second = round(Task.objects.count() / (time.monotonic() - began))

    def enqueue(self) -> None:
        """Enqueue the tasks, in small transactions, as a site does."""
        plan = [
            ("plain", size.PLAIN, tasks.count.enqueue),
            ("atomic", size.ATOMIC, tasks.count_once.enqueue),
            ("retried", size.LUCKY, tasks.count_with_luck.enqueue),
        ]
        for kind, count, _enqueue in plan:
            evidence.expect(kind, range(count))
        evidence.expect("slow", range(size.SLOW))
        calls = [(enqueue, (number,)) for _kind, count, enqueue in plan for number in range(count)]
        calls += [(tasks.count_slowly.enqueue, (number, 0.6)) for number in range(size.SLOW)]
        users = list(Order.objects.values_list("user_id", flat=True)[:1])
        calls += [(tasks.spend.enqueue, (users[0], 30, f"task {number}")) for number in range(size.SPENDING)]
        # Tasks of each kind are spread over the whole time.
        mixed = [call for start in range(40) for call in calls[start::40]]
        for start in range(0, len(mixed), 50):
            with transaction.atomic():
                for enqueue, arguments in mixed[start : start + 50]:
                    enqueue(*arguments)
            time.sleep(size.ENQUEUE_OVER * 50 / len(mixed))

    def kill_one(self) -> float:
        """Kill -9 the worker that runs the most tasks at this moment; return when."""
        deadline = time.monotonic() + 20
        while True:
            running = dict(
                Task.objects.filter(status="RUNNING", task_path__endswith="count_slowly")
                .values_list("worker")
                .order_by()
                .annotate(count=Count("pk"))
            )
            if running or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        chosen = max(running, key=lambda worker: running[worker]) if running else Worker.objects.values_list("pk")[0][0]
        # The row has the process that runs tasks. Its parent is killed, so both end, and other workers rescue them.
        victim = self._worker_above(Worker.objects.get(pk=chosen).pid)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        self.screen.say(f"Worker {self.workers.index(victim) + 1} (process {victim.pid}) was killed with SIGKILL.")
        return time.monotonic()

    def _worker_above(self, pid: int) -> subprocess.Popen[bytes]:
        """Return the worker whose process is this one, or an ancestor of it."""
        workers = {process.pid: process for process in self.workers}
        while pid not in workers:
            pid = int(subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, check=True).stdout)
        return workers[pid]

    def watch(self, began: float, *, until: Any, is_last: bool = False) -> None:
        """Show the progress until something is true. Raises ``TimeoutError`` when it never is."""
        deadline = time.monotonic() + LONGEST
        while True:
            counts = evidence.counts()
            self._show(counts, began)
            if until(counts):
                break
            for work in self.background:
                work.check()
            for process in self.workers:
                if process.poll() not in (None, -signal.SIGKILL):
                    self.fleet.require_running(process)
            if time.monotonic() > deadline:
                raise TimeoutError(f"This did not end in time: {counts}\n{self.fleet.output()}")
            time.sleep(0.1)
        if is_last:
            self._show(counts, began, is_last=True)

    def _show(self, counts: dict[str, int], began: float, *, is_last: bool = False) -> None:
        done = counts.get("SUCCESSFUL", 0)
        p50, p95 = evidence.latency()
        rate = done / max(time.monotonic() - began, 0.001)
        note = f"{rate:,.0f}/s  p50 {p50:.0f} ms  p95 {p95:.0f} ms  taken over {counts['taken_over']}"
        total = max(size.tasks(), sum(counts.values()) - counts["taken_over"])
        self.screen.progress(done, total, note, is_last=is_last)

    def look_at_what_is_left(self, rush: Rush) -> None:
        """Ask the database."""
        report = self.report
        report.findings = [
            *evidence.collect(),
            evidence.Finding("A hundred clicks charged once", abs(report.double_click_charges - 1)),
            evidence.Finding(
                "Every cart became one order", abs(Order.objects.count() - 1 - size.SHOPPERS * size.CARTS)
            ),
            evidence.Finding(
                "The shop answered only 200 and 409", sum(rush.answers.values()) - rush.answers[200] - rush.answers[409]
            ),
            evidence.Finding(
                "Every charge that was answered is in the ledger", abs(rush.charged - Order.objects.count())
            ),
            evidence.Finding("The killed worker's tasks were taken over", int(evidence.counts()["taken_over"] == 0)),
        ]
        report.tasks = Task.objects.count()
        report.taken_over = evidence.counts()["taken_over"]
        report.latency_p50_ms, report.latency_p95_ms = (round(value, 1) for value in evidence.latency())
        report.http_answers = {str(status): count for status, count in sorted(rush.answers.items())}
        report.charges = Order.objects.count()


def _is_all_done(counts: dict[str, int]) -> bool:
    waiting = sum(counts.get(status, 0) for status in ("READY", "SCHEDULED", "RUNNING"))
    return waiting == 0 and counts.get("SUCCESSFUL", 0) + counts.get("FAILED", 0) >= size.tasks()
