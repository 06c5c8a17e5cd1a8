"""Sessions of the package's own."""

from __future__ import annotations

import pytest

from django_pglock.postgres.sessions import dedicated_connection, set_limits

pytestmark = pytest.mark.django_db


def test_settings_that_the_server_does_not_know_are_left_out():
    connection = dedicated_connection("default")
    set_limits(connection, {"no_such_setting": "1s", "lock_timeout": "7s"})
    with connection.cursor() as cursor:
        cursor.execute("SELECT current_setting('no_such_setting', true), current_setting('lock_timeout')")
        assert cursor.fetchone() == (None, "7s")
    connection.close()
