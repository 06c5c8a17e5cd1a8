"""The HTTP server of the probes: its answers, and clients that do not end."""

from __future__ import annotations

import socket
import time

import pytest
from django.core.management import CommandError, call_command

from django_pglock.errors import ConfigurationError
from django_pglock.worker.probes import http_server as probes
from django_pglock.worker.probes.probes import ProbeServer
from django_pglock.worker.supervising.channel import REPLACE, SupervisorSockets
from tests.conftest import NEVER
from tests.db.worker.probes.asking import ask

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_worker_answers_probes(probed, eventually):
    worker = probed()
    assert ask(worker, "/livez")[:2] == (200, "ok\n")
    eventually(lambda: ask(worker, "/readyz?verbose")[:2] == (200, "ok\n"))
    status, body, headers = ask(worker, "/livez", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, "", "3")
    assert ask(worker, "/")[:2] == (404, "There are /livez, /readyz and /metrics.\n")
    assert ask(worker, "/livez", "POST")[0] == 501
    assert "Python" not in headers["Server"]


def test_slow_clients_are_cut_off_and_block_no_others(probed, eventually, monkeypatch, closing):
    """Clients that send nothing, and clients that send a byte now and then. Neither kind keeps a thread."""
    monkeypatch.setattr(probes, "LONGEST_REQUEST", NEVER)
    worker = probed()
    server = worker.probes.server._server
    address = ("127.0.0.1", worker.probes.server.port)
    clients = [closing.enter_context(socket.create_connection(address)) for _ in range(probes.MOST_REQUESTS + 4)]
    eventually(lambda: len(server._requests) == probes.MOST_REQUESTS)
    assert ask(worker, "/livez")[0] == 200
    monkeypatch.setattr(probes, "LONGEST_REQUEST", 1.0)
    trickle, begun = clients[-1], time.monotonic()
    with pytest.raises(OSError, match=r".+"):
        while time.monotonic() - begun < NEVER:
            trickle.send(b"G")
            time.sleep(0.05)
    for client in clients[:-1]:
        client.settimeout(60)
        assert client.recv(1) == b"", "it was not cut off"
    eventually(lambda: not server._requests)
    assert ask(worker, "/livez")[0] == 200


def test_nothing_listens_unless_a_port_is_asked_for(worker):
    assert worker().probes.server is None


@pytest.fixture
def channel(closing):
    ours, theirs = map(closing.enter_context, socket.socketpair())
    return SupervisorSockets(1, theirs), ours


def test_a_process_that_is_replaced_leaves_its_port_to_the_other(probed, channel):
    """They overlap: the old one finishes its tasks while the new one starts."""
    worker = probed(supervisor=channel[0])
    worker.retire()
    heard = channel[1].recv(100)
    assert REPLACE in heard
    with socket.create_server(("127.0.0.1", worker.probes.server.port)):
        pass


def test_a_worker_refuses_to_start_if_its_probe_port_is_taken(worker):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"cannot be answered at 127.0.0.1 port {port}"):
            worker(probe_port=f"127.0.0.1:{port}")
        with pytest.raises(CommandError, match="cannot be answered"):
            call_command("runlockworker", "--probe-port", f"127.0.0.1:{port}", "--no-reload")


@pytest.mark.parametrize(("number", "port"), [(1, 9187), (4, 9190)])
def test_each_process_of_a_supervisor_has_a_port_of_its_own(number, port):
    assert ProbeServer(None, None, host="127.0.0.1", port=9187, number=number).port == port
    assert ProbeServer(None, None, host="127.0.0.1", port=0, number=number).port == 0
