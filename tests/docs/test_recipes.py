"""The recipes of the pages do what the pages say. ``test_docs.py`` only runs their code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.db import connection, transaction
from django.test import Client, RequestFactory
from django.urls import path

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.testing import hold, run_tasks
from example_project.systems import payments
from tests.conftest import ROOT
from tests.docs.test_docs import run_blocks

pytestmark = pytest.mark.django_db(transaction=True)
Page = Callable[[str], ModuleType]


@pytest.fixture
def page(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> Page:
    """Return what runs the code of a page."""
    return lambda name: run_blocks(ROOT / "docs" / f"{name}.md", monkeypatch)


def tasks_of(function):
    return Task.objects.filter(task_path=function.module_path).order_by("pk")


def test_a_mail_is_sent_after_the_commit_and_not_after_a_rollback(page):
    send_receipt = page("tasks").send_receipt
    with transaction.atomic():
        send_receipt.enqueue(1, "ada@example.com")
        assert mail.outbox == []
    with transaction.atomic():
        send_receipt.enqueue(2, "bob@example.com")
        transaction.set_rollback(True)
    run_tasks()
    assert [each.to for each in mail.outbox] == [["ada@example.com"]]


@pytest.mark.usefixtures("own_registry")
def test_all_mails_of_the_project_are_sent_by_tasks(monkeypatch):
    mails = importlib.import_module("example_project.mails")
    message = mail.EmailMultiAlternatives("Welcome", "Hello", "shop@example.com", ["ada@example.com"])
    message.attach_alternative("<p>Hello</p>", "text/html")
    sent = []
    monkeypatch.setattr(mails, "smtp", lambda: SimpleNamespace(send_messages=sent.extend))
    mails.TaskBackend().send_messages([message])
    assert sent == []
    run_tasks()
    assert [each.subject for each in sent] == ["Welcome"]
    assert sent[0].message().as_string().count("Hello") == 2


class Receiver(BaseHTTPRequestHandler):
    """Fails once, then accepts."""

    keys: list[str] = []

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.keys.append(self.headers["Idempotency-Key"])
        self.send_response(503 if len(self.keys) == 1 else 200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server whose first answer is 503."""
    monkeypatch.setattr(Receiver, "keys", [])
    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_connection_of_a_refused_delivery_is_closed(page, address):
    """The exception would keep it open, as long as the exception itself is kept."""
    with pytest.raises(HTTPError, match="503") as caught:
        page("retries").deliver.func(1, address, "key", {})
    assert caught.value.closed


def test_the_connection_of_a_refused_charge_is_closed(address, settings):
    settings.PAYMENTS_URL = address
    with pytest.raises(HTTPError, match="503") as caught:
        payments.charge(80, key="cart")
    assert caught.value.closed


def test_a_webhook_is_repeated_with_the_same_key(page, address):
    page("retries").announce(1, address, {"order": 5})
    assert [each.outcome for each in run_tasks()] == ["retried", "succeeded"]
    assert len(Receiver.keys) == 2
    assert len(set(Receiver.keys)) == 1


def test_the_burst_is_let_through_and_the_rest_waits(page):
    fetch = page("limits").fetch
    for number in range(15):
        fetch.enqueue("acme", f"/items/{number}")
    fetch.enqueue("other", "/items/1")
    ready = Task.objects.filter(status="READY")
    assert ready.filter(args__0="acme").count() == 10
    assert ready.filter(args__0="other").count() == 1
    assert Task.objects.filter(status="BLOCKED").count() == 5


def test_the_small_tenant_does_not_wait_for_the_large_one(page):
    export = page("limits").export
    enqueue_many(export, [("large", number) for number in range(300)])
    enqueue_many(export, [("small", number) for number in range(5)])
    run_tasks()
    order = list(Task.objects.order_by("finished_at", "id").values_list("args__0", flat=True))
    assert max(place for place, tenant in enumerate(order) if tenant == "small") < 200


def test_each_customer_gets_a_report(page):
    schedules = page("schedules")
    schedules.all_reports.enqueue()
    run_tasks()
    assert sorted(each.args[0] for each in tasks_of(schedules.report_for)) == schedules.CUSTOMERS


def test_each_customer_gets_a_report_at_three_local_time(page):
    schedules = page("schedules")
    for tick in ("2026-11-26T02:00:00+00:00", "2026-11-26T08:00:00+00:00", "2026-11-26T21:15:00+00:00"):
        schedules.reports_at_three.using(meta={"schedule": tick}).enqueue()
    run_tasks()
    assert [each.args[0] for each in tasks_of(schedules.report_for)] == [1, 3, 2]


def test_a_tick_is_skipped_while_the_run_before_it_is_there(page):
    fetch_rates = page("schedules").fetch_rates
    assert fetch_rates.enqueue().id == fetch_rates.enqueue().id


@pytest.mark.parametrize(
    ("order", "done"),
    [(12, ["reserved 12", "charged 12", "shipped 12"]), (13, ["reserved 13", "undone 13"])],
)
def test_a_step_that_fails_undoes_the_steps_before_it(order, done, page):
    workflows = page("workflows")
    workflows.place(order)
    run_tasks()
    assert done == workflows.DONE


def test_an_import_says_how_far_it_is_and_is_there_once(page):
    workflows = page("workflows")
    first, second = workflows.import_products.enqueue(7), workflows.import_products.enqueue(7)
    assert first.id == second.id
    assert workflows.progress_of(first.id) == 0
    run_tasks()
    assert workflows.progress_of(first.id) == 100
    assert workflows.SEEN == workflows.LINES


def test_the_user_is_told_after_the_last_part_of_an_import(page):
    workflows = page("workflows")
    workflows.import_in_parts.enqueue(9)
    run_tasks()
    assert workflows.progress_of_parts(9) == 100
    assert (sorted(workflows.STORED[:-1]), workflows.STORED[-1]) == (sorted(workflows.UPLOADS[9]), "mail")


def test_the_parts_of_an_import_stop_when_they_are_cancelled(page):
    workflows = page("workflows")
    workflows.import_in_parts.call(9)
    workflows.cancel_parts(9)
    assert run_tasks() == []
    assert set(Task.objects.values_list("status", flat=True)) == {"CANCELLED"}


def test_one_leader_works_at_a_time_and_tokens_grow(page):
    serve = page("locks").serve
    works: list[int] = []
    threads = [Thread(target=serve, args=(works.append, 5)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert works == sorted(works)
    assert len(works) == 15


def test_the_view_for_a_monitor_says_that_no_worker_is_there(page):
    answer = page("admin").tasks_are_run(RequestFactory().get("/"))
    assert (answer.status_code, answer.content) == (503, b"No worker is alive.")


# The small Celery project of the documentation does the same before and after it was moved.


def test_the_celery_page_shows_tasks_with_the_same_effect(page):
    module = page("coming_from")
    shop = vars(module)
    shop["app"].conf.update(task_always_eager=True, task_eager_propagates=True)
    shop["pay_with_celery"](1)
    shop["pay"](2)
    assert shop["sent"] == [1]
    run_tasks()
    assert shop["sent"] == [1, 2]
    assert shop["report_by_celery"]() == shop["report"].call() == "2 receipts"
    [there] = shop["app"].conf.beat_schedule.values()
    assert shop["report"].cron == f"{min(there['schedule'].minute)} {min(there['schedule'].hour)} * * *"


# The checkout of the page about locks: for HTML, Django REST framework and django-ninja.


@pytest.fixture
def shop(page: Page) -> Iterator[ModuleType]:
    """The code of the page, as the URLs of a project, with its table."""
    module: Any = page("locks")
    module.urlpatterns = [
        path("html/", module.checkout),
        path("drf/", module.checkout_drf),
        path("ninja/", module.api.urls),
    ]
    with connection.schema_editor() as editor:
        editor.create_model(module.Order)
    yield module
    with connection.schema_editor() as editor:
        editor.delete_model(module.Order)


@pytest.mark.parametrize("address", ["/html/", "/drf/", "/ninja/checkout"])
def test_a_checkout_charges_once_however_the_second_click_comes(address, shop, settings, monkeypatch):
    settings.ROOT_URLCONF = shop.__name__
    charges = []
    monkeypatch.setattr(shop, "charge_card", lambda order_id, idempotency_key: charges.append(idempotency_key) or "ch")
    user = User.objects.create_user("ada")
    client = Client()
    client.force_login(user)
    key = str(uuid4())
    kind = {} if address == "/html/" else {"content_type": "application/json"}
    with hold(f"checkout:{user.pk}"):
        assert client.post(address, {"key": key}, **kind).status_code == 409
    answers = [client.post(address, {"key": key}, **kind) for _ in range(2)]
    assert {answer.status_code for answer in answers} == {302 if address == "/html/" else 200}
    assert charges == [key]
    assert shop.Order.objects.count() == Task.objects.filter(task_path=shop.send_receipt.module_path).count() == 1


def test_a_checkout_that_died_after_the_charge_is_completed_by_the_next_click(shop):
    order = shop.Order.objects.create(key=uuid4(), user=User.objects.create_user("ada"))
    assert shop.pay(order.user, order.key).charge == f"ch-{order.pk}"
    assert Task.objects.filter(task_path=shop.send_receipt.module_path).count() == 1
