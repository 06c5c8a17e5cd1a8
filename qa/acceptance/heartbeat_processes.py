"""Heartbeat processes, and the sessions in which they beat."""

from __future__ import annotations

import os

from django.db import connection


def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sessions_of_helpers():
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockworker heartbeat process'")
        return cursor.fetchone()[0]
