"""Leases on a half-open connection: a proxy acknowledges all data, and no answer comes."""

from __future__ import annotations

import time

import pytest
from django.db import connection, connections

from django_pglock import Lease, LockError, leader
from django_pglock.locks import lease_thread, leases
from tests.conftest import NEVER
from tests.proxy import Proxy

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.fixture
def proxy(transactional_db, monkeypatch):
    with Proxy.before(connection) as proxy:
        for name, value in (("HOST", "127.0.0.1"), ("PORT", str(proxy.port))):
            monkeypatch.setitem(connections.settings["default"], name, value)
        # A thread keeps its settings, so a lease thread that exists already would not connect through the proxy.
        monkeypatch.setattr(lease_thread, "_lease_thread", None)
        yield proxy
        connection.close()


def test_a_lease_is_renewed_on_another_connection(proxy, eventually):
    """One renewal gets no answer, the next one opens a new session."""
    with Lease("half open", ttl=12) as lease:
        proxy.black_hole(new=False)
        # The session of this thread is half open, too.
        first = lease._holder._deadline
        eventually(lambda: lease._holder._deadline > first)
        lease.assert_held()


def test_a_leader_steps_down_at_the_first_renewal_without_an_answer(proxy):
    """If the leader stepped down only when the lease expires, the reason would contain "six seconds"."""
    with pytest.raises(LockError, match=r"could not be renewed \("), leader("half open", ttl=6) as leadership:
        proxy.black_hole(new=False)
        assert leadership.lost.wait(NEVER)
        leadership.assert_held()


def test_releasing_a_lease_on_a_half_open_connection_ends(proxy, monkeypatch):
    monkeypatch.setattr(leases.LeaseHolder._execute, "__kwdefaults__", {"within": 1.0})
    began = time.monotonic()
    with Lease("half open", ttl=60):
        proxy.black_hole(new=False)
    assert time.monotonic() - began < NEVER
    with Lease("half open", ttl=60):
        pass
