"""The server of the probes: its port."""

from __future__ import annotations

import socket

import pytest
from django.core.management import CommandError, call_command

from django_pglock.errors import ConfigurationError
from django_pglock.worker.probes.probes import ProbeServer

pytestmark = pytest.mark.django_db(transaction=True)


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
