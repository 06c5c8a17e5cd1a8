"""What the pages about webhooks, other queues and a checkout do."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from http.server import HTTPServer
from threading import Thread
from types import ModuleType
from urllib.error import HTTPError
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import path

from django_pglock.models import Task
from django_pglock.testing import hold, run_tasks
from example_project.systems import payments
from tests.conftest import ROOT
from tests.docs.test_docs import blocks


@pytest.fixture
def page(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code of the page, as a module."""
    module = types.ModuleType("page_about_webhooks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in blocks(ROOT / "docs" / "retries.md", "python", under="Deliver webhooks"):
        exec(code, vars(module))
    return module


@pytest.fixture
def address(page: ModuleType) -> Iterator[str]:
    """The address of a server whose first answer is 503."""
    with HTTPServer(("127.0.0.1", 0), page.Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_the_connection_of_a_refused_delivery_is_closed(page, address):
    """The exception would keep it open, as long as the exception itself is kept."""
    with pytest.raises(HTTPError, match="503") as caught:
        page.deliver.func(1, address, "key", {})
    assert caught.value.closed


def test_the_connection_of_a_refused_charge_is_closed(address, settings):
    settings.PAYMENTS_URL = address
    with pytest.raises(HTTPError, match="503") as caught:
        payments.charge(80, key="cart")
    assert caught.value.closed


# The small Celery project of the documentation does the same before and after it was moved.


PAGE = (ROOT / "docs" / "coming_from.md").read_text()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
def test_the_celery_page_shows_tasks_with_the_same_effect(monkeypatch):
    module = types.ModuleType("shop_of_the_documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(code, "coming_from.md", "exec"), module.__dict__)
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
def shop(own_registry: None, transactional_db: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The code of the page, as the URLs of a project, with its table."""
    monkeypatch.setitem(apps.all_models, "orders", {})
    module = types.ModuleType("shop_of_the_page_about_locks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    heading = "A double click on Pay: the whole of a checkout"
    for code in blocks(ROOT / "docs" / "locks.md", "python", under=heading):
        exec(compile(code, "locks.md", "exec"), vars(module))
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
