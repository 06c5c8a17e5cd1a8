"""Which ends of a session are the fault of the function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import OperationalError
from psycopg.errors import IdleInTransactionSessionTimeout

from django_pglock.worker.running.ended_session import fault_of_function


def error_of_limit():
    error = OperationalError("lost")
    error.__cause__ = IdleInTransactionSessionTimeout("too long")
    return error


@pytest.mark.parametrize("session", [None, SimpleNamespace(closed=False)], ids=["none", "open"])
def test_the_limit_of_a_session_to_another_database_does_not_count(session):
    assert fault_of_function(error_of_limit(), session, is_closed=False) is None


def test_the_limit_of_the_own_session_counts():
    fault = fault_of_function(error_of_limit(), SimpleNamespace(closed=True), is_closed=False)
    assert "idle_in_transaction_session_timeout" in str(fault)


def test_a_session_that_is_lost_in_an_outage_does_not_count():
    assert fault_of_function(OperationalError("lost"), SimpleNamespace(closed=True), is_closed=False) is None
