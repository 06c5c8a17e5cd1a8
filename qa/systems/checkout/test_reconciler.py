"""One of several reconcilers works, the one with the lock. When it is killed or cut off, another one takes over.

The scenario tests the same with leaders by election: ``test_scenario.py``.
"""

from __future__ import annotations

import signal
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection

from django_pglock.models import AdvisoryLock
from example_project.systems.checkout.models import Cart, Payment
from example_project.systems.checkout.workers import reconcile_by_lock
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)

CUT_OFF = "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE application_name = %s"


class Reconcilers:
    """Processes that all run the same function. Each is known by the name of its sessions."""

    def __init__(self, start, current):
        self.names = {}
        self.start = start
        self.current = current

    def add(self, count):
        for _ in range(count):
            name = f"reconciler {uuid4().hex[:8]}"
            self.names[self.start(name)] = name

    def working(self):
        """Return the process that works. Start another if few are left: one that is slow may lose its lease and end."""
        if sum(process.poll() is None for process in self.names) < 3:
            self.add(1)
        return next((process for process in self.names if self.current(process, self.names[process])), None)

    def cut_off(self, process):
        with connection.cursor() as cursor:
            cursor.execute(CUT_OFF, [self.names[process]])


@pytest.fixture
def holders(process, site):
    """Reconcilers by an advisory lock."""

    def is_holder(started, name):
        return AdvisoryLock.objects.for_name("reconciler").held().filter(application_name=name).exists()

    def start(name):
        return process(reconcile_by_lock, 0.05, PGAPPNAME=name, PAYMENTS_URL=site.fleet.environment["PAYMENTS_URL"])

    return Reconcilers(start, is_holder)


@pytest.fixture
def takes_over(eventually, site):
    """Wait until another process works, and until a payment that a crash has left open is settled."""
    number = iter(range(100))

    def wait(reconcilers, before):
        now = eventually(lambda: (found := reconcilers.working()) not in (None, before) and found)
        customer = User.objects.create_user(f"customer {next(number)}")
        payment = Payment.objects.create(cart=Cart.objects.create(customer=customer, total=80), amount=80)
        eventually(lambda: Payment.objects.filter(pk=payment.pk).exclude(charge=None).exists())
        return now

    return wait


def test_another_holder_takes_over_but_not_from_a_frozen_one(holders, takes_over, eventually):
    """The session of a frozen process is alive. ``locks --terminate`` ends it, and then the next process works."""
    holders.add(4)
    first = takes_over(holders, None)
    first.kill()
    second = takes_over(holders, first)
    holders.cut_off(second)
    third = takes_over(holders, second)
    assert second.wait(NEVER) != 0
    third.send_signal(signal.SIGSTOP)
    held = AdvisoryLock.objects.for_name("reconciler").held().get()
    waiter = eventually(AdvisoryLock.objects.for_name("reconciler").filter(is_granted=False).first)
    assert waiter.blocked_by == [held.pid]
    call_command("locks", "--terminate", str(held.pid))
    takes_over(holders, third)
    third.send_signal(signal.SIGCONT)
    assert third.wait(NEVER) != 0
