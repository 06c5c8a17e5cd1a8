"""Photographs the pages of the admin in a headless Chromium: wide, wide and dark, and as narrow as a phone.

The example project is filled with tasks in all states, locks with waiters, and leases. Nothing on the pages is made up:
workers have run the tasks, and threads of this process wait for the lock.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

FOLDER = Path(__file__).resolve().parents[1] / "_static"
SETTINGS = "example_project.settings"
PASSWORD = "admin"  # noqa: S105 - of a database that lives for a minute
#: Of each page, its address below /admin/django_pglock/, and the greatest height of its picture.
PAGES = {
    "overview": ("overview/", 1800),
    "tasks": ("task/", 960),
    "failures": ("failuregroup/", 960),
    "task": ("task/{failed}/change/", 2200),
    "sleeping": ("task/{sleeping}/change/", 1100),
    "gathering": ("task/{gathering}/change/", 1100),
    "events": ("event/", 960),
    "workers": ("worker/", 960),
    "locks": ("advisorylock/", 960),
    "leases": ("lease/", 960),
}
#: Where a page ends, in pixels.
END = "document.querySelector('#content').getBoundingClientRect().bottom + 20"
#: Of each kind of picture: the width, and whether it is dark. A phone shows no more than 844 pixels.
KINDS = {"": (1500, False), "-dark": (1500, True), "-narrow": (390, False)}
PHONE = 844
#: Minutes of work before the pictures of charts are taken.
MINUTES = 8


def take() -> None:
    """Write all pictures of the admin."""
    with a_busy_shop() as (address, ids):
        from qa.browser.chromium import Chromium

        with Chromium() as browser:
            browser.open(f"{address}/admin/")
            browser.submit(username="admin", password=PASSWORD)
            for page, (path, tallest) in PAGES.items():
                for kind, (width, dark) in KINDS.items():
                    most = min(tallest, PHONE) if kind == "-narrow" else tallest
                    browser.show(width=width, height=PHONE, dark=dark)
                    browser.open(f"{address}/admin/django_pglock/{path.format(**ids)}")
                    browser.show(width=width, height=min(most, int(browser.evaluate(END))), dark=dark)
                    save(browser.picture(), FOLDER / f"admin-{page}{kind}.png")


def save(picture: bytes, path: Path) -> None:
    """Write a picture with a palette of 256 colours. It has less than half of the bytes, and looks the same."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


@contextmanager
def a_busy_shop() -> Iterator[tuple[str, dict[str, str]]]:
    """Run the example project with work of every kind. Yields its address, and the ids of some tasks by their state."""
    from example_project.postgres import PrivatePostgres

    with PrivatePostgres() as server, ExitStack() as stack:
        # For a moment: the commands of other pictures start servers of their own.
        stack.enter_context(patch.dict(os.environ, DATABASE_URL=server.url, DJANGO_SETTINGS_MODULE=SETTINGS))
        import django

        django.setup()
        from django.contrib.auth.models import User
        from django.core.management import call_command
        from django.db import connections

        call_command("migrate", verbosity=0)
        User.objects.create_superuser("admin", password=PASSWORD)
        stack.callback(connections.close_all)
        from example_project.demo.processes import Fleet, free_port

        fleet = Fleet({})
        stack.callback(fleet.stop)
        for _ in range(2):
            fleet.start("runlockworker", "--threads", "4", "--no-reload")
        port = free_port()
        fleet.start("serveshop", str(port))
        ids = enqueue_work()
        hold_locks(stack)
        from example_project.demo.shoppers import wait_for_shop

        wait_for_shop(port)
        yield f"http://127.0.0.1:{port}", ids


def enqueue_work() -> dict[str, str]:
    """Enqueue tasks, some for each outcome. Return the ids of three: it has failed, it sleeps, it gathers."""
    from django.db.models import F

    from django_pglock import emit
    from django_pglock.models import Number, Queue, Task
    from example_project.shop import tasks

    work_for_minutes()
    for number in range(6):
        tasks.count.enqueue(number)
        tasks.count_once.enqueue(number)
    for number in range(3):
        tasks.count_with_luck.enqueue(number)
    failed = tasks.send_receipt.using(max_attempts=3).enqueue(order_id=404)
    until(lambda: not Task.objects.exclude(status__in=["SUCCESSFUL", "FAILED"]).exists())
    Queue.objects.pause("ledger")
    for amount in (30, 45, 60):
        tasks.spend.using(priority=10).enqueue(1, amount, "A book about locks")
    Task.objects.filter(pk=tasks.count.using(run_after=timedelta(days=1)).enqueue(99).id).cancel()
    tasks.send_receipt.using(run_after=timedelta(hours=2)).enqueue(order_id=7)
    for number in range(2):
        tasks.count_slowly.enqueue(number, 600.0)
    sleeping, gathering = tasks.follow_up.enqueue(7), tasks.count_together.enqueue(8)
    emit("packed:7", {"parcel": 1})
    emit("paid:8", {"amount": 30})
    until(lambda: Task.objects.suspended().count() == 2)
    until(lambda: Task.objects.filter(status="RUNNING", started_at__lte=F("last_attempted_at")).count() == 4)
    # The overview shows what a worker has counted last.
    until(lambda: Number.objects.filter(kind="READY", queue="ledger", count=3).exists())
    return {"failed": failed.id, "sleeping": sleeping.id, "gathering": gathering.id}


def work_for_minutes() -> None:
    """Run tasks until the history has some minutes, for the charts. The tasks are deleted: other pictures show few."""
    from django_pglock.models import Number, Task, Worker
    from example_project.shop import tasks

    # Otherwise the first tasks wait for the start of the workers.
    until(lambda: Worker.objects.alive().count() == 2)
    for second in range(60 * MINUTES):
        at = timedelta(seconds=second)
        for number in range(second % 50 // 5):
            tasks.count.using(run_after=at).enqueue(number)
        if second % 7 == 0:
            tasks.count_with_luck.using(run_after=at).enqueue(second)
        if second % 40 == 0:
            tasks.send_receipt.using(run_after=at).enqueue(order_id=404)
    until(lambda: Number.objects.filter(seconds=60, queue="", kind="ran").count() > MINUTES)
    until(lambda: not Task.objects.exclude(status__in=["SUCCESSFUL", "FAILED"]).exists())
    Task.objects.all().prune(older_than=0, statuses=["SUCCESSFUL", "FAILED"])


def hold_locks(stack: ExitStack) -> None:
    """Hold locks and leases until the stack is closed, with two threads that wait for a lock."""
    from django_pglock import Lease, lock
    from django_pglock.models import AdvisoryLock

    report, checkout = lock("report:2026-11").acquire(), lock("checkout:42").acquire()
    for _ in range(2):
        threading.Thread(target=use_and_let_go, args=("checkout:42",), daemon=True).start()
    for name, ttl, owner in (
        ("nightly-report", 3600, "web-1"),
        ("leader:indexer", 60, "web-2"),
        ("prices", None, "cron-1"),
    ):
        stack.callback(Lease(name, ttl=ttl, owner=owner).acquire().release)
    stack.callback(report.release)
    stack.callback(checkout.release)
    until(lambda: AdvisoryLock.objects.filter(is_granted=False).count() == 2)


def use_and_let_go(name: str) -> None:
    """Wait for a lock, and release it."""
    from django.db import connections

    from django_pglock import lock

    with lock(name):
        pass
    connections.close_all()


def until(condition: Callable[[], bool]) -> None:
    """Wait until something is true."""
    while not condition():
        time.sleep(0.1)
