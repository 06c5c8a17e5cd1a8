"""The proxy of the tests: each method has its documented effect on connections."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest
from django.db import connection

from tests.proxy import Proxy

pytestmark = pytest.mark.django_db


@pytest.fixture
def proxy():
    with Proxy.before(connection) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy):
    opened = []

    def connect(**parameters):
        info = connection.connection.info
        opened.append(
            psycopg.connect(
                host="127.0.0.1", port=proxy.port, user=info.user, password=info.password, dbname=info.dbname,
                autocommit=True, options="-c client_connection_check_interval=100ms", **parameters,
            )
        )  # fmt: skip
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def one(raw):
    return raw.execute("SELECT 1").fetchone()


def test_the_proxy_passes_all_data_through(connect):
    assert one(connect()) == (1,)
    assert len(connect().execute("SELECT repeat('x', 3000000)").fetchone()[0]) == 3_000_000


def test_a_cut_ends_open_connections_and_may_refuse_new_ones(proxy, connect):
    raw = connect()
    proxy.cut()
    with pytest.raises(psycopg.OperationalError):
        one(raw)
    assert one(connect()) == (1,)
    proxy.cut(new=True)
    with pytest.raises(psycopg.OperationalError):
        connect()
    proxy.pass_through()
    assert one(connect()) == (1,)


def test_a_cut_ends_a_statement_that_waits_for_its_answer(proxy, connect, eventually):
    raw = connect()
    failed = []

    def wait():
        try:
            raw.execute("SELECT pg_sleep(60)")
        except psycopg.OperationalError as error:
            failed.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    eventually(lambda: raw.pgconn.transaction_status == psycopg.pq.TransactionStatus.ACTIVE)
    proxy.cut()
    thread.join(60)
    assert failed


def test_a_delay_holds_back_both_ways(proxy, connect):
    raw = connect()
    proxy.delay(0.1)
    began = time.monotonic()
    assert one(raw) == (1,)
    assert time.monotonic() - began >= 0.2


def test_a_black_hole_says_nothing_and_gives_back_what_it_swallowed(proxy, connect):
    raw = connect()
    answers = []
    proxy.black_hole()
    thread = threading.Thread(target=lambda: answers.append(one(raw)), daemon=True)
    thread.start()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        connect(connect_timeout=2)
    assert answers == []
    proxy.pass_through()
    thread.join(60)
    assert answers == [(1,)]


def test_a_black_hole_for_old_connections_only(proxy, connect):
    raw = connect()
    proxy.black_hole(new=False)
    assert one(connect()) == (1,)
    thread = threading.Thread(target=one, args=(raw,), daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    proxy.pass_through()
    thread.join(60)
    assert not thread.is_alive()
