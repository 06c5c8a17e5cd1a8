"""Leases between processes: a holder that is stopped and continues too late."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from django_pglock import Lease
from django_pglock.models import Lease as Row
from tests.conftest import environment_at
from tests.sample.models import Effect
from tests.warm.process import start

pytestmark = [pytest.mark.acceptance, pytest.mark.django_db(transaction=True)]

HOLDER = """
import sys, time
import django
django.setup()
from django_pglock import Lease, LockLost
from tests.sample.models import Effect

def write(token):
    return Effect.objects.filter(name="report", number__lte=token).update(number=token)

try:
    with Lease("report", ttl=8) as lease:
        print("holds", lease.token, flush=True)
        while not lease.lost.is_set():
            time.sleep(0.01)
        print("wrote" if write(lease.token) else "was refused", flush=True)
except LockLost:
    print("lost", flush=True)
"""


@pytest.fixture
def holder():
    process = start([sys.executable, "-c", HOLDER], env=environment_at(), stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds 1\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_process_that_was_stopped_notices_and_its_late_write_is_refused(holder):
    Effect.objects.create(name="report", number=0)
    holder.send_signal(signal.SIGSTOP)
    with Lease("report", ttl=300, timeout=60) as lease:
        assert Effect.objects.filter(name="report", number__lte=lease.token).update(number=lease.token) == 1
        holder.send_signal(signal.SIGCONT)
        assert [holder.stdout.readline(), holder.stdout.readline()] == ["was refused\n", "lost\n"]
        lease.assert_held()
        assert Row.objects.get(name="report").token == lease.token == 2


UNFINISHED = """
import django
django.setup()
from django_pglock import Lease

def numbers():
    with Lease("report", ttl=30):
        yield 1

generator = numbers()
next(generator)
"""


def test_a_process_ends_although_a_generator_with_a_lease_is_unfinished():
    """Python closes the generator when it has stopped the thread that would release the lease."""
    command = [sys.executable, "-c", UNFINISHED]
    ended = subprocess.run(command, env=environment_at(), stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert "The process ends before its leases were released." in ended.stderr
