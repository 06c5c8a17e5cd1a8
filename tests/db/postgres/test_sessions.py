"""Sessions of the package's own."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from django.db import connections

from django_pglock.postgres.sessions import dedicated_connection, limit_waiting, set_limits, unreadable_styles

pytestmark = pytest.mark.django_db

SELECT = "SELECT timestamptz '2026-11-25 12:00:00+00', interval '26 hours'"


@pytest.fixture
def german(monkeypatch):
    """A database whose dates and intervals psycopg cannot read."""
    options = connections["default"].settings_dict["OPTIONS"]
    monkeypatch.setitem(options, "options", "-c DateStyle=German -c IntervalStyle=sql_standard")


def read(connection):
    try:
        with connection.cursor() as cursor:
            cursor.execute(SELECT)
            return cursor.fetchone()
    finally:
        connection.close()


def test_the_packages_own_sessions_read_dates_and_intervals(german):
    row = (datetime(2026, 11, 25, 12, tzinfo=timezone.utc), timedelta(hours=26))
    assert read(dedicated_connection("default")) == row


def test_a_workers_connections_read_dates_and_intervals_also_after_a_rollback(german):
    connection = dedicated_connection("default").copy()
    connection.settings_dict |= {"AUTOCOMMIT": False, "PGLOCK_SETS_STYLES": False}
    limit_waiting(connection)
    connection.ensure_connection()
    connection.rollback()
    assert read(connection)[1] == timedelta(hours=26)


def test_the_connections_of_the_project_stay_as_they_are(german):
    connection = connections["default"].copy()
    connection.ensure_connection()
    assert unreadable_styles(connection) == {"DateStyle": "German, DMY", "IntervalStyle": "sql_standard"}
    with pytest.raises(NotImplementedError, match="DateStyle"):
        read(connection)


def test_no_statement_is_sent_if_the_styles_are_readable():
    connection = dedicated_connection("default")
    sent = []
    with connection.execute_wrapper(lambda execute, *query: sent.append(query[0]) or execute(*query)):
        connection.ensure_connection()
    connection.close()
    assert [each for each in sent if "set_config" in each] == []


def test_settings_that_the_server_does_not_know_are_left_out():
    connection = dedicated_connection("default")
    set_limits(connection, {"no_such_setting": "1s", "lock_timeout": "7s"})
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('no_such_setting', true), current_setting('lock_timeout')")
        assert cursor.fetchone() == (None, "7s")
    connection.close()
