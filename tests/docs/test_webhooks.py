"""What the page about webhooks and the client of the payment provider do with an answer that is an error."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from http.server import HTTPServer
from threading import Thread
from types import ModuleType
from urllib.error import HTTPError

import pytest

from example_project.systems import payments
from tests.conftest import ROOT
from tests.docs.test_docs import blocks


@pytest.fixture
def page(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The code of the page, as a module."""
    module = types.ModuleType("page_about_webhooks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in blocks(ROOT / "docs" / "howto" / "webhooks.md", "python"):
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
