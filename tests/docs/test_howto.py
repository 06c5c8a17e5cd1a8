"""What the pages about webhooks and about other queues do."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from http.server import HTTPServer
from threading import Thread
from types import ModuleType
from urllib.error import HTTPError

import pytest

from django_pglock.testing import run_tasks
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
