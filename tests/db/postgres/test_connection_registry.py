"""The registry of Django's connections: those of all threads, while they are open."""

from __future__ import annotations

import pytest

from django_pglock.postgres.connection_registry import aliases, register_connection
from django_pglock.postgres.sessions import dedicated_connection
from tests.concurrency.locks.test_pools import pooled as pooled  # a fixture

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def other():
    made = dedicated_connection("default")
    register_connection(made)
    yield made
    made.close()


def test_open_connections_are_found_by_their_psycopg_connections(other):
    assert id(other.connection) not in aliases()
    other.ensure_connection()
    raw = other.connection
    assert aliases()[id(raw)] == "default"
    other.close()
    assert id(raw) not in aliases()


def test_a_pool_is_found_beside_the_connection_that_it_has_lent(pooled):
    register_connection(pooled)
    pooled.ensure_connection()
    found = aliases()
    assert found[id(pooled.connection)] == found[id(pooled.pool)] == "default"
