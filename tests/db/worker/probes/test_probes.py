"""The probes of a worker start and stop together."""

from __future__ import annotations

import socket

import pytest

from django_pglock.worker.supervising.channel import REPLACE, SupervisorSockets

pytestmark = pytest.mark.django_db(transaction=True)


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
