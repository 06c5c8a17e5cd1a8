"""The checkout behind two processes of gunicorn and of uvicorn: clicks at once, crashes, and a sale."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import connection

from django_pglock import lock
from django_pglock.models import AdvisoryLock
from example_project.systems.checkout import scenario
from example_project.systems.checkout.models import Cart, Payment
from example_project.systems.checkout.workers import begin_sale
from example_project.systems.web import GUNICORN, UVICORN, Browser
from tests.conftest import NEVER

pytestmark = pytest.mark.django_db(transaction=True)


class Customer(Browser):
    """A user with one cart, before one of the servers."""

    def __init__(self, name, port, suffix):
        self.user = User.objects.create_user(name)
        self.cart = Cart.objects.create(customer=self.user, total=80)
        self.path = f"/systems/checkout/{self.cart.pk}/{suffix}"
        super().__init__(port, self.user)

    def click(self):
        return self.post(self.path)

    def clicks(self, times):
        return [answer.status for answer in self.post_at_once(times, self.path)]


@pytest.fixture(params=["wsgi", "asgi"])
def customer(request, site, transactional_db):
    """Make a customer of the sync view behind gunicorn, or of the async one behind uvicorn."""
    command, suffix = {"wsgi": (GUNICORN, ""), "asgi": (UVICORN, "async/")}[request.param]
    [port] = site.serve(command)
    return lambda name: Customer(name, port, suffix)


@pytest.fixture
def first_click(site, eventually):
    """Click, and stay between the charge and its answer until the end of the block."""

    @contextmanager
    def clicked(customer):
        site.provider.post("/hold")
        try:
            with ThreadPoolExecutor(1) as pool:
                try:
                    click: Future = pool.submit(customer.click)
                    eventually(lambda: charges_of(site, customer.cart))
                    yield click
                finally:
                    site.provider.post("/release")
        finally:
            site.provider.post("/release")

    return clicked


def charges_of(site, cart):
    return [entry for entry in site.provider.book() if entry["key"] == str(cart.pk)]


def test_of_many_clicks_one_is_charged(site, customer, first_click):
    """The other requests find the lock busy, or find the payment after the release."""
    ann = customer("ann")
    with first_click(ann) as first:
        assert ann.clicks(8) == [409] * 8
        bob = customer("bob")
        site.provider.post("/release")
        assert bob.click().status == 200, "others are not held up"
    assert first.result().status == 200
    assert ann.click().content == first.result().content
    [charge] = charges_of(site, ann.cart)
    assert (charge["id"], charge["requests"]) == (first.result().content["charge"], 1)


def test_a_process_that_is_killed_between_charge_and_commit_charges_once(site, customer, first_click, eventually):
    """The lock is free, and the row is open. The next click has the same key, so it gets the same charge."""
    ann = customer("ann")
    name = f"checkout:{ann.user.pk}"
    with first_click(ann) as first:
        holder = AdvisoryLock.objects.for_name(name).held().get().application_name
        os.kill(int(holder.split()[1]), signal.SIGKILL)
        assert first.exception(NEVER) is not None
        assert Payment.objects.get().charge is None
    answer = eventually(lambda: answered(ann))
    assert answer.status == 200
    [charge] = charges_of(site, ann.cart)
    assert (charge["id"], charge["requests"]) == (answer.content["charge"], 2)
    assert (Payment.objects.get().charge, Payment.objects.get().invoice) == (charge["id"], 1)


def answered(customer):
    """Click until a process answers that is alive, and to which the lock of the dead one is free."""
    try:
        answer = customer.click()
    except OSError:
        return None
    return None if answer.status == 409 else answer


def test_a_sale_waits_for_checkouts_and_keeps_new_ones_out(customer, first_click, process, eventually):
    ann, bob = customer("ann"), customer("bob")
    with first_click(ann) as first:
        sale = process(begin_sale, 25)
        eventually(lambda: AdvisoryLock.objects.for_name("shop").filter(is_granted=False).exists())
        answer = bob.click()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
        assert_waits(locks(), "shop")
    assert first.result().status == 200
    assert sale.wait(NEVER) == 0
    assert bob.click().status == 200
    assert dict(Payment.objects.values_list("cart__customer__username", "amount")) == {"ann": 80, "bob": 60}


def locks():
    out = StringIO()
    call_command("locks", stdout=out)
    return out.getvalue()


def assert_waits(shown, name):
    """The holder of the shared lock comes first, and below it the one that waits for all of it."""
    lines = [line for line in shown.splitlines() if name in line]
    assert "shared" in lines[0], shown
    assert lines[-1].startswith("  ↳"), shown
    assert "exclusive" in lines[-1], shown


def test_a_program_that_locks_a_crc_keeps_the_sale_out(process, eventually):
    """The number is the CRC that PostgreSQL 18, Ruby and zlib make of the text "price change"."""
    with lock(401536690), connection.cursor() as cursor:
        sale = process(begin_sale, 25)
        eventually(lambda: AdvisoryLock.objects.filter(key=401536690, is_granted=False).exists())
        if connection.pg_version >= 18_00_00:
            cursor.execute("SELECT crc32(convert_to('price change', 'UTF8'))")
            assert cursor.fetchone() == (401536690,)
    assert sale.wait(NEVER) == 0


# The scenario of the system checkout: what it claims holds.


def test_the_checkout_system_has_no_violation_under_load(harness, monkeypatch):
    """With one process of uvicorn, which is a new interpreter otherwise. The tests of the endpoint have two."""
    monkeypatch.setattr(scenario, "UVICORN", scenario.UVICORN.replace("--workers=2", "--workers=1"))
    scenario.run_scenario(harness)
    harness.judge()
