"""Receivers of ``connection_created`` as projects have them: what a session needs before its first statement."""

from __future__ import annotations

from typing import Any

from django.apps import AppConfig
from django.db.backends.signals import connection_created

SETTINGS = """
SELECT set_config('TimeZone', 'Asia/Tokyo', false), set_config('statement_timeout', '77s', false),
    set_config('search_path', 'inside', false), set_config('app.tenant', 'fourth', false),
    set_config('application_name', 'prepared ' || current_setting('application_name'), false)
"""


class NewSessionsConfig(AppConfig):
    name = "qa.foreign.new_sessions"

    def ready(self) -> None:
        connection_created.connect(prepare)


def prepare(connection: Any, **kwargs: Any) -> None:
    """Set what this project needs. The tables are in a schema that is on no other search path."""
    with connection.cursor() as cursor:
        cursor.execute(SETTINGS)
