"""Locks and Django's transactions: who has opened them, and what happens after their end."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from django.db import close_old_connections, connection, connections, transaction
from django.http import HttpResponse
from django.test import Client, override_settings
from django.urls import path

from django_pglock import LockLost, LockNotAvailable, LockScopeError, lock, lock_view
from django_pglock.errors import ConfigurationError
from tests.db.locks.sessions import execute, setting
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


# After the commit


def test_hooks_after_the_commit_run_under_a_session_lock_and_after_a_transaction_lock(somebody):
    """PostgreSQL frees the transaction's lock with the COMMIT, and Django calls the hooks after it."""
    free = {}

    def note(scope):
        free[scope] = somebody.can_have("a")

    with transaction.atomic(), lock("a"):
        transaction.on_commit(lambda: note("transaction"))
    with lock("a"), transaction.atomic():
        transaction.on_commit(lambda: note("session"))
    assert free == {"transaction": True, "session": False}


@pytest.mark.parametrize("close", [lambda: connection.close(), lambda: (connection.close(), connection.connect())])
def test_a_connection_that_is_closed_or_made_anew_in_the_body_is_noticed(somebody, close, eventually):
    with pytest.raises(LockLost, match="closed"), lock("a"):
        close()
    eventually(lambda: somebody.can_have("a"))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("close", [lambda: connection.close(), close_old_connections])
def test_a_connection_that_is_closed_in_the_transaction_of_a_lock_is_noticed(somebody, close, own, eventually):
    """Django's ``atomic()`` drops the changes, and raises no error."""
    block = nullcontext() if own else transaction.atomic()
    with pytest.raises(LockLost, match="closed"), block, lock("a", scope="transaction"):
        close()
    eventually(lambda: somebody.can_have("a"))
    assert not connection.in_atomic_block


# ATOMIC_REQUESTS


@lock_view("atomic")
def view(request):
    Effect.objects.create(name="in the request", number=int(connection.in_atomic_block))
    return HttpResponse("done")


@lock_view("plain", scope="session")
def session_view(request):
    return HttpResponse("done")


@transaction.non_atomic_requests
@lock_view("outside")
def outside_view(request):
    Effect.objects.create(name="outside", number=int(connection.in_atomic_block))
    return HttpResponse("done")


urlpatterns = [path("atomic", view), path("session", session_view), path("outside", outside_view)]


@override_settings(ROOT_URLCONF=__name__)
def test_lock_views_work_with_atomic_requests(somebody):
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        assert Client().get("/atomic").content == b"done"
        assert Effect.objects.get().number == 1
        assert somebody.can_have("atomic")
        somebody.holds("atomic")
        assert Client().get("/atomic").status_code == 409
        with pytest.raises(LockScopeError, match="inside a transaction"):
            Client().get("/session")
        assert Client().get("/outside").content == b"done"
        assert Effect.objects.get(name="outside").number == 0
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False


def test_without_autocommit_everything_is_inside_a_transaction(somebody):
    """Code that sets AUTOCOMMIT to False commits by hand. A session lock would be released before the commit."""
    connection.settings_dict["AUTOCOMMIT"] = False
    connection.close()
    try:
        with lock("a", timeout=1) as handle:
            assert handle.scope == "transaction"
            assert setting("lock_timeout") == "0"
        assert not somebody.can_have("a")
        connection.commit()
        assert somebody.can_have("a")
        with pytest.raises(LockScopeError), lock("a", scope="session"):
            pass
    finally:
        connection.close()
        connection.settings_dict["AUTOCOMMIT"] = True


# What a decorator may be on


class Shop:
    number = 7

    @lock("shop:{self.number}:{day}")
    def close(self, day, *, at):
        return at()

    @classmethod
    @lock("shops:{cls.number}")
    def close_all(cls, at):
        return at()

    @staticmethod
    @lock("static")
    def sweep(at):
        return at()


def test_lock_decorates_instance_class_and_static_methods(somebody):
    assert Shop().close("monday", at=lambda: somebody.can_have("shop:7:monday")) is False
    assert Shop.close_all(lambda: somebody.can_have("shops:7")) is False
    assert Shop.sweep(lambda: somebody.can_have("static")) is False


# Transactions that Django did not open


@pytest.fixture
def by_hand():
    """Begin and end transactions without ``atomic()``."""
    yield
    connection.rollback()
    connection.set_autocommit(True)


@pytest.mark.parametrize("timeout", [None, 0, 1])
def test_after_a_begin_of_ones_own_the_lock_lasts_to_the_commit(somebody, timeout):
    execute("SET statement_timeout = '50s'")
    execute("BEGIN")
    with lock("a", timeout=timeout) as handle:
        assert handle.scope == "transaction"
    assert not somebody.can_have("a")
    assert setting("statement_timeout") == "50s", "nothing of ours leaks into the caller's transaction"
    execute("COMMIT")
    assert somebody.can_have("a")
    assert not handle
    connection.close()


def test_busy_leaves_a_transaction_usable_that_django_did_not_open(by_hand, somebody):
    somebody.holds("a")
    transaction.set_autocommit(False)
    for timeout in (0, 0.01):
        with pytest.raises(LockNotAvailable):
            lock("a", timeout=timeout).acquire()
    assert not Effect.objects.exists()
    with pytest.raises(LockScopeError, match="released before the commit"):
        lock("b", scope="session").acquire()


# Other databases


def test_a_database_that_is_not_postgresql_is_refused_at_the_call(monkeypatch):
    locked = lock("a")
    monkeypatch.setattr(connections["default"], "vendor", "sqlite")
    with pytest.raises(ConfigurationError, match="is sqlite"), locked:
        pass
