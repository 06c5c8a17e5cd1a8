"""The checkout live: clicks at once, a killed web process, a sale, and four ways for a reconciler to go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import StringIO
from typing import Any

from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection

from django_pglock.models import AdvisoryLock, Lease
from example_project.systems.checkout import workers
from example_project.systems.checkout.models import Cart, Payment
from example_project.systems.harness import Harness
from example_project.systems.web import GUNICORN, NEVER, UVICORN, Browser, Site, wait_for

CLICKS = 20
#: The provider's memory as a table, to be compared with ours.
BOOK = "jsonb_to_recordset(%s::jsonb) AS book (id text, kind text, key text, content jsonb)"


class Customer(Browser):
    """A user with a cart, before one of the servers."""

    def __init__(self, name: str, port: int, suffix: str = "") -> None:
        self.user, _ = User.objects.get_or_create(username=name)
        cart = Cart.objects.create(customer=self.user, total=80)
        self.key = str(cart.pk)
        self.path = f"/systems/checkout/{cart.pk}/{suffix}"
        super().__init__(port, self.user)


class Scenario:
    """One run."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.site = Site(harness.fleet)
        self.pool = ThreadPoolExecutor(4)
        #: Processes, and the names of their sessions.
        self.reconcilers: dict[subprocess.Popen[bytes], str] = {}

    def run(self) -> None:
        """Run the parts and ask the database."""
        for _ in range(5):
            self.start_reconciler()
        self.wsgi, self.asgi = self.site.serve(GUNICORN, UVICORN)
        self.double_clicks(Customer("ann", self.wsgi), "gunicorn, sync view")
        self.double_clicks(Customer("bob", self.asgi, "async/"), "uvicorn, async view")
        self.sale(Customer("cleo", self.asgi, "async/"), Customer("dan", self.wsgi))
        self.crash(Customer("eve", self.wsgi))
        self.take_over()
        self.ask()

    def double_clicks(self, customer: Customer, server: str) -> None:
        """Press the button many times at once, and once more later."""
        answers = customer.post_at_once(CLICKS, customer.path)
        counts = Counter(answer.status for answer in answers)
        answers.append(customer.post(customer.path))
        charges = {answer.content["charge"] for answer in answers if answer.status == 200}
        self.harness.say(
            f"{CLICKS} clicks at once, two processes ({server}): {counts[200]} x 200, {counts[409]} x 409. "
            f"Charges in the answers, a later click included: {len(charges)}."
        )

    def sale(self, first: Customer, second: Customer) -> None:
        """Begin a sale during a checkout."""
        click = self.click_and_hold(first)
        sale = self.harness.call(workers.begin_sale, 25)
        wait_for(lambda: AdvisoryLock.objects.for_name("shop").filter(is_granted=False).exists())
        answer = second.post(second.path)
        self.harness.say(
            f"\nA sale begins during a checkout. It waits for the checkout; a new checkout gets {answer.status}, "
            f"Retry-After {answer.headers['Retry-After']}. python3 manage.py locks:\n\n{shown()}"
        )
        self.release()
        click.result(), sale.wait(NEVER)
        answer = second.post(second.path)
        paid = dict(Payment.objects.values_list("cart__customer__username", "amount"))
        self.harness.say(
            f"The first paid {paid['cleo']}, then the sale began, and the second paid {paid['dan']} ({answer.status})."
        )

    def crash(self, customer: Customer) -> None:
        """Kill the web process that has charged and does not know it yet, and click again."""
        click = self.click_and_hold(customer)
        name = f"checkout:{customer.user.pk}"
        process = int(AdvisoryLock.objects.for_name(name).held().get().application_name.split()[1])
        os.kill(process, signal.SIGKILL)
        click.exception()
        self.release()
        self.harness.say(f"\nWeb process {process} was killed between the charge and the COMMIT.")
        answer = wait_for(lambda: answer_of_the_living(customer))
        entry = next(entry for entry in self.site.provider.book() if entry["key"] == customer.key)
        self.harness.say(
            f"The next click got {answer.status} with {answer.content['charge']}: "
            f"the provider was asked {entry['requests']} times, and charged once."
        )

    def take_over(self) -> None:
        """Let each reconciler go in another way. The next one settles a payment that a crash has left open."""
        ways: list[tuple[str, Callable[[Any], object]]] = [
            ("killed", lambda process: process.kill()),
            ("frozen", lambda process: process.send_signal(signal.SIGSTOP)),
            ("cut off from the database", lambda process: cut_off(self.reconcilers[process])),
            ("ended", lambda process: process.terminate()),
        ]
        self.harness.say("\nFive reconcilers run, one of them works. It goes, and a crash leaves a payment open:")
        gone = None
        for number, (how, go) in enumerate(ways):
            leader = wait_for(partial(self.successor_of, gone))
            began = time.monotonic()
            go(leader)
            payment = left_open(f"customer {number}")
            successor = wait_for(partial(self.successor_of, leader))
            wait_for(Payment.objects.filter(pk=payment).exclude(charge=None).exists)
            seconds = time.monotonic() - began
            self.harness.say(f"  {leader.pid} was {how}: {successor.pid} has settled the payment after {seconds:.1f} s")
            if how == "frozen":
                leader.send_signal(signal.SIGCONT)
                leader.wait(NEVER)
                self.harness.say(f"  {leader.pid} was woken, noticed that its lease is over, and ended")
            gone = leader

    def start_reconciler(self) -> None:
        """Start one more process."""
        name = f"reconciler {len(self.reconcilers) + 1}"
        self.reconcilers[self.harness.call(workers.reconcile, 2.0, 0.1, PGAPPNAME=name)] = name

    def successor_of(self, gone: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes] | None:
        """Return the process that is the leader, unless it is the one that goes.

        On a slow machine a leader may lose its lease, and end. Another one is started then, as a service manager would.
        """
        if sum(process.poll() is None for process in self.reconcilers) < 2:
            self.start_reconciler()
        lease = Lease.objects.held().filter(name="reconciler").first()
        pid = int(lease.owner.rpartition(":")[2]) if lease is not None else None
        return next((each for each in self.reconcilers if each.pid == pid and each is not gone), None)

    def click_and_hold(self, customer: Customer) -> Future[Any]:
        """Click, and return when the provider has charged and holds back its answer."""
        self.site.provider.post("/hold")
        click = self.pool.submit(customer.post, customer.path)
        wait_for(lambda: any(entry["key"] == customer.key for entry in self.site.provider.book()))
        return click

    def release(self) -> None:
        """Let the provider answer."""
        self.site.provider.post("/release")

    def ask(self) -> None:
        """Claim what holds."""
        book = json.dumps(self.site.provider.book())
        claim = self.harness.claim
        claim(
            "Every charge of the provider is in a payment of the same cart and amount, and nothing else is",
            f"""SELECT count(*) FROM checkout_payment AS p FULL JOIN {BOOK} ON p.charge = book.id
                AND p.cart_id::text = book.key AND p.amount = (book.content ->> 'amount')::int
                WHERE p.id IS NULL OR book.id IS NULL""",
            book,
        )
        claim("Every cart is paid, once", UNPAID)
        claim("The invoices are numbered from 1 without a gap", GAPS)
        self.harness.claim_no_lock_is_left()


UNPAID = """
SELECT count(*) FROM checkout_cart AS c
WHERE (SELECT count(*) FROM checkout_payment AS p WHERE p.cart_id = c.id AND p.invoice IS NOT NULL) <> 1
"""
GAPS = """
SELECT count(*) FROM generate_series(1, (SELECT max(invoice) FROM checkout_payment)) AS number
WHERE NOT EXISTS (SELECT FROM checkout_payment AS p WHERE p.invoice = number)
"""
CUT_OFF = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"


def run_scenario(harness: Harness) -> None:
    """Run the system."""
    Scenario(harness).run()


def cut_off(name: str) -> None:
    """End all sessions of a process."""
    with connection.cursor() as cursor:
        cursor.execute(CUT_OFF, [name])


def left_open(name: str) -> int:
    """Write what a crash before the charge leaves: a payment that is open."""
    customer, _ = User.objects.get_or_create(username=name)
    return int(Payment.objects.create(cart=Cart.objects.create(customer=customer, total=50), amount=50).pk)


def shown() -> str:
    """Return what ``manage.py locks`` prints."""
    out = StringIO()
    call_command("locks", stdout=out)
    return "".join(f"    {line}\n" for line in out.getvalue().splitlines())


def answer_of_the_living(customer: Customer) -> Any:
    """Click; return None if the process that was killed was asked, or PostgreSQL has not seen its end yet."""
    try:
        answer = customer.post(customer.path)
    except OSError:
        return None
    return None if answer.status == 409 else answer
