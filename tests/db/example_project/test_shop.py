"""The example shop: two clicks on the button charge once."""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from django_pglock import lock
from django_pglock.models import Task
from example_project.shop.management.commands.demo import prepare
from example_project.shop.models import CreditEntry, Order, Product, Receipt
from example_project.shop.tasks import send_receipt, spend
from tests.db.store.workers import beat

pytestmark = pytest.mark.django_db(transaction=True)
CHECKOUT = reverse("shop:checkout")
PERSON = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture
def buyer():
    user = User.objects.create_user("buyer")
    CreditEntry.objects.create(user=user, amount=100, reason="gift")
    return user


@pytest.fixture
def product():
    return Product.objects.create(name="A book", price=30)


def browser(user):
    client = Client()
    client.force_login(user)
    return client


def test_twenty_clicks_at_once_charge_once(buyer, product, in_threads):
    cart = uuid4()
    browsers = [browser(buyer) for _ in range(20)]
    answers = in_threads(lambda n: browsers[n].post(CHECKOUT, {"cart": cart, "product": product.pk}), 20)
    assert Order.objects.count() == 1
    assert CreditEntry.objects.balance_of(buyer.pk) == 70
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert sum(answer.status_code == 200 and answer.json()["charged"] for answer in answers) == 1
    assert all(answer["Retry-After"] == "1" for answer in answers if answer.status_code == 409)


def test_a_click_while_the_first_is_under_way_gets_409(buyer, product, in_threads):
    with lock("checkout", buyer.pk):
        [answer] = in_threads(lambda _: browser(buyer).post(CHECKOUT, {"cart": uuid4(), "product": product.pk}), 1)
    assert answer.status_code == 409


def test_a_person_gets_pages_with_links_to_the_order_its_task_and_the_lock(buyer, product, in_threads):
    User.objects.filter(pk=buyer.pk).update(is_staff=True, is_superuser=True)
    buyer.refresh_from_db()
    client, data = browser(buyer), {"cart": uuid4(), "product": product.pk}
    with lock("checkout", buyer.pk):
        [busy] = in_threads(lambda _: browser(buyer).post(CHECKOUT, data, headers=PERSON), 1)
    pages = [busy, client.post(CHECKOUT, data, headers=PERSON), client.post(CHECKOUT, data, headers=PERSON)]
    assert [page.status_code for page in pages] == [409, 200, 200]
    assert [page.content.decode().split("h1>")[1] for page in pages] == [
        "One moment</", "Thank you</", "You have this already</",
    ]  # fmt: skip
    assert f'name="cart" value="{data["cart"]}"' in busy.content.decode()
    linked = {link for page in pages for link in re.findall(r'href="(/admin/[^"]+)"', page.content.decode())}
    assert len(linked) == 3
    assert {client.get(link).status_code for link in linked} == {200}


def test_the_receipt_is_enqueued_with_the_order_and_sent_once(buyer, product):
    browser(buyer).post(CHECKOUT, {"cart": uuid4(), "product": product.pk})
    assert Task.objects.get().task_path == send_receipt.module_path
    for _ in range(2):
        send_receipt.call(order_id=Order.objects.get().pk)
    assert Receipt.objects.count() == 1


def test_the_balance_never_goes_below_zero(buyer, in_threads):
    """Ten purchases of 30 credits at the same time, with a balance of 100."""
    from django.db import transaction

    def buy(number):
        with transaction.atomic():
            return spend.call(buyer.pk, 30, str(number))

    assert in_threads(buy, 10).count(True) == 3
    assert CreditEntry.objects.balance_of(buyer.pk) == 10


def test_wrong_input_gets_an_answer(buyer, product):
    client = browser(buyer)
    for data in ({}, {"cart": "x", "product": product.pk}, {"cart": uuid4(), "product": 0}):
        assert client.post(CHECKOUT, data).status_code == 400
    assert client.get(CHECKOUT).status_code == 405
    assert Client().post(CHECKOUT).status_code == 302
    product.price = 1000
    product.save()
    assert client.post(CHECKOUT, {"cart": uuid4(), "product": product.pk}).status_code == 402
    page = client.get("/").content.decode()
    assert "You have 100 credits." in page
    assert " style=" not in page


def test_the_health_page_shows_whether_a_worker_runs(client):
    assert client.get(reverse("shop:healthz")).status_code == 503
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    answer = client.get(reverse("shop:healthz"))
    assert answer.status_code == 200
    assert answer.json() == {"healthy": True, "database": "ok", "workers": 1, "oldest_due_seconds": 0.0}


@pytest.mark.parametrize(
    ("due", "status", "healthy"),
    [(None, "READY", False), (-1, "READY", True), (-400, "SCHEDULED", False), (3600, "SCHEDULED", True)],
)
def test_health_counts_from_when_a_task_was_due(client, due, status, healthy):
    """A task that is scheduled for later is not reported as late; a due task that is not promoted is."""
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    send_receipt.enqueue(order_id=1)
    now = timezone.now()
    run_after = None if due is None else now + timedelta(seconds=due)
    Task.objects.update(enqueued_at=now - timedelta(hours=9), run_after=run_after, status=status)

    answer = client.get(reverse("shop:healthz"))

    assert answer.json()["healthy"] is healthy
    assert answer.status_code == (200 if healthy else 503)


def test_the_demo_deletes_no_data_without_an_option(buyer):
    """DATABASE_URL may name a database with data that must not be deleted."""
    send_receipt.enqueue(order_id=1)
    with pytest.raises(CommandError, match="--erase"):
        prepare(erase=False)
    assert Task.objects.count() == 1
    assert CreditEntry.objects.count() == 1

    prepare(erase=True)

    assert not Task.objects.exists()
    assert User.objects.get() == buyer
    prepare(erase=False)
