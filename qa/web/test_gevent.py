"""Where gevent has replaced threads by greenlets: locks and results work, and leases say what they need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
from gevent import monkey; monkey.patch_all()
import gevent, django, environ
from django.conf import settings
from django.core.management import call_command
settings.configure(DATABASES={"default": environ.Env().db()}, INSTALLED_APPS=["django_pglock"])
django.setup()
call_command("migrate", verbosity=0)
from django.db import connection
from django_pglock import Lease, leader, lock
from django_pglock.errors import ConfigurationError
held = []
def work():
    for _ in range(20):
        with lock("one", timeout=60):
            held.append(1)
            assert len(held) == 1
            gevent.sleep(0.001)
            held.pop()
    connection.close()
gevent.joinall([gevent.spawn(work) for _ in range(3)], raise_error=True)
for take in (Lease("a", ttl=5), leader("b")):
    try:
        take.acquire()
    except ConfigurationError as error:
        assert "gevent" in str(error)
    else:
        raise AssertionError
print("fine")
"""

#: Twenty greenlets wait, one of them for too long, and other greenlets continue meanwhile.
WAITING = """
from gevent import monkey; monkey.patch_all()
import gevent, django, environ, threading, time
from django.conf import settings
settings.configure(
    DATABASES={"default": environ.Env().db()}, INSTALLED_APPS=["django_pglock", "tests.sample"],
    TASKS={"default": {"BACKEND": "django_pglock.backend.PostgresBackend", "QUEUES": []}},
    DJANGO_PGLOCK={"POLL_INTERVAL": 600},
)
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django.db import connection, connections
from django.db.models.functions import Now
from django_pglock.models import Task, Waiter
from django_pglock.store import await_end
from django_pglock.store.release import release
from tests.sample import tasks
results = [tasks.nothing.enqueue() for _ in range(20)]
ticks = []
def tick():
    while True:
        ticks.append(1)
        gevent.sleep(0.01)
ticking = gevent.spawn(tick)
def wait(result):
    try:
        return result.wait(120).is_finished
    finally:
        connections.close_all()
def wait_too_long():
    try:
        tasks.nothing.enqueue().wait(0.1)
    except TimeoutError:
        return True
    finally:
        connections.close_all()
waiting = [gevent.spawn(wait, result) for result in results] + [gevent.spawn(wait_too_long)]
while Waiter.objects.count() != 20 or not waiting[-1].ready():
    gevent.sleep(0.01)
before = len(ticks)
while len(ticks) < before + 5:
    gevent.sleep(0.01)  # where others stand still, so does this, until the waits are over
ids = [int(result.id) for result in results]
Task.objects.filter(pk__in=ids).update(status="SUCCESSFUL", finished_at=Now())
release("default", ids)
gevent.joinall(waiting, timeout=60, raise_error=True)
assert [each.value for each in waiting] == [True] * 21
while await_end._listeners:
    gevent.sleep(0.01)
ticking.kill()
print("fine")
"""


@pytest.mark.parametrize("program", [PROGRAM, WAITING], ids=["locks", "results"])
def test_locks_work_in_greenlets(program):
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stdout + done.stderr
