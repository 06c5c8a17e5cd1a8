"""The warning about a session or a socket that nobody closes names the test that has opened it."""

from __future__ import annotations

import gc
import http.client
import socket
import threading

import pytest
from django.db import connection

from tests import origins

pytestmark = pytest.mark.django_db(transaction=True)


def lose(thing):
    """Delete the last reference, which is in a circle."""
    circle = [thing]
    circle.append(circle)


def test_the_warning_of_a_session_names_the_test_the_thread_and_the_calls(request):
    def select():
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")

    thread = threading.Thread(target=select, name="forgetful")
    thread.start()
    thread.join()
    with pytest.warns(ResourceWarning) as warned:
        gc.collect()
    [said] = [str(each.message) for each in warned]
    assert "was deleted while still open" in said
    assert f"opened in {request.node.nodeid} (call), in forgetful, by test_origins.py:" in said
    assert said.endswith(" select")


def test_the_warning_of_a_socket_names_the_test_and_the_calls(request):
    """An answer that nobody has read keeps the socket of its client, which has forgotten it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = http.client.HTTPConnection(*server.getsockname())
        client.request("GET", "/")
        end, _ = server.accept()
        with end:
            end.sendall(b"HTTP/1.0 503 Busy\r\n\r\nbusy")
            lose(client.getresponse())
        client.close()
    with pytest.warns(ResourceWarning) as warned:
        gc.collect()
    [said] = [str(each.message) for each in warned]
    assert said.startswith("unclosed <socket.socket [closed]")
    assert f"opened in {request.node.nodeid} (call), in MainThread, by test_origins.py:" in said


def test_open_sessions_are_those_that_nobody_has_closed(somebody):
    connection.ensure_connection()
    before = origins.open_sessions()
    assert connection.connection in before
    somebody.ask("SELECT 1")
    assert origins.open_sessions().keys() - before.keys() == {somebody.connection.connection}
    somebody.connection.close()
    assert origins.open_sessions().keys() == before.keys()
