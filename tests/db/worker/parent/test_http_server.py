"""The HTTP server of the probes: its answers, and clients that do not end."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest
from django.core.management import CommandError, call_command

from django_pglock.errors import ConfigurationError
from django_pglock.worker import Worker
from django_pglock.worker.parent.probes import Handler
from tests.conftest import NEVER
from tests.db.worker.parent.asking import ask, metrics

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def closing():
    with ExitStack() as stack:
        yield stack


def test_a_worker_answers_probes(probed, eventually):
    worker = probed()
    assert ask(worker, "/livez")[:2] == (200, "ok\n")
    eventually(lambda: ask(worker, "/readyz?verbose")[:2] == (200, "ok\n"))
    status, body, headers = ask(worker, "/livez", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, "", "3")
    assert ask(worker, "/")[:2] == (404, "There are /livez, /readyz and /metrics.\n")
    assert ask(worker, "/livez", "POST")[0] == 501
    assert "Python" not in headers["Server"]


def test_silent_clients_are_cut_off_and_block_no_others(probed, monkeypatch, closing):
    monkeypatch.setattr(Handler, "timeout", 0.1)
    worker = probed()
    address = ("127.0.0.1", worker.server.port)
    clients = [closing.enter_context(socket.create_connection(address, NEVER)) for _ in range(20)]
    assert ask(worker, "/livez")[0] == 200
    for client in clients:
        assert client.recv(1) == b"", "it was not cut off"


def test_nothing_listens_unless_a_port_is_asked_for(worker):
    assert worker().server is None


def test_all_children_have_one_server_and_a_replacement_changes_nothing(probed, eventually):
    """Their numbers are summed."""
    worker = probed(processes=2, threads=3)
    eventually(lambda: metrics(worker)["processes"] == 2)
    eventually(lambda: ask(worker, "/readyz")[0] == 200)
    assert metrics(worker)["threads"] == 6


def test_a_worker_refuses_to_start_if_its_probe_port_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot be answered at 127.0.0.1 port {port}"):
            Worker(probe_port=f"127.0.0.1:{port}").run()
        with pytest.raises(CommandError, match="cannot be answered"):
            call_command("runlockworker", "--probe-port", f"127.0.0.1:{port}", "--no-reload")
