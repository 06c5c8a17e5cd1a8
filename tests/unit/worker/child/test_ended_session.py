"""Which ends of a session count as a failure of the function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import OperationalError
from psycopg.errors import IdleInTransactionSessionTimeout

from django_pglock.worker.child.run import SessionAfterCall, error_if_function_ended_session

ENDED = SimpleNamespace(closed=True)


def error_of_limit():
    error = OperationalError("lost")
    error.__cause__ = IdleInTransactionSessionTimeout("too long")
    return error


@pytest.mark.parametrize("session", [None, SimpleNamespace(closed=False)], ids=["none", "open"])
def test_the_limit_of_a_session_to_another_database_does_not_count(session):
    assert error_if_function_ended_session(error_of_limit(), session, SessionAfterCall()) is None


def test_the_limit_of_the_own_session_counts():
    fault = error_if_function_ended_session(error_of_limit(), ENDED, SessionAfterCall())
    assert "idle_in_transaction_session_timeout" in str(fault)


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        (
            "FATAL:  terminating connection due to transaction timeout\nFATAL:  server conn crashed?\n",
            "by its limit tr",
        ),
        ("FATAL:  terminating connection due to idle-in-transaction timeout\n", "by its limit idle_in_tr"),
        ("FATAL:  terminating connection due to administrator command\n", None),
        ("server closed the connection unexpectedly\n", None),
    ],
)
def test_the_last_message_says_which_limit_was_met_if_the_function_has_caught_the_error(said, limit):
    fault = error_if_function_ended_session(
        OperationalError("the connection is closed"), ENDED, SessionAfterCall(last_message=said)
    )
    assert (limit in str(fault)) if limit else fault is None


def test_a_session_that_is_lost_in_an_outage_does_not_count():
    assert error_if_function_ended_session(OperationalError("lost"), ENDED, SessionAfterCall()) is None
