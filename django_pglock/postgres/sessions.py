"""Sessions in addition to Django's, for parts that need their own: listeners, heartbeats, leases, locks of coroutines.

Each session is opened by its own Django connection object, of the backend that the project has configured. So all
settings and hooks of Django's own sessions apply to it as well: ``get_connection_params`` and ``get_new_connection`` of
a backend's subclass (changing passwords, certificates), ``assume_role``, ``init_connection_state``, receivers of
``connection_created``, and the test database.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

from django.utils.module_loading import import_string
from psycopg import IsolationLevel

from django_pglock.postgres.connections import backend_pid, connection_for

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: How long libpq waits on a silent network. Its own defaults are hours, or no limit. Seconds to connect; seconds and
#: probes until an idle connection counts as lost; milliseconds without an acknowledgement of sent data until a
#: connection counts as lost. https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
TIME_LIMITS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}

#: What statements of this package need, whatever the role's defaults are. psycopg sets an isolation level only in a
#: BEGIN. A single statement in autocommit has the role's default level.
NEEDED = {"default_transaction_isolation": "read committed", "array_nulls": "on"}

# A setting that the server does not know is NULL. To read pg_settings takes a millisecond more.
SET_SETTINGS = """
SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS wanted (name, value)
WHERE current_setting(name, true) IS NOT NULL AND pg_backend_pid() = %s
"""


def dedicated_connection(using: str, *, application_name: str | None = None) -> DatabaseWrapper:
    """Return a new, unshared Django connection to ``using``, outside of each pool and without a maximum age.

    It is opened at its first use, in any thread. The owner closes it. Its transactions are READ COMMITTED, because the
    statements of this package need that. After ``set_limits``, its single statements are READ COMMITTED, too.
    ``application_name`` is shown in ``pg_stat_activity``.
    """
    settings = copy.deepcopy(connection_for(using).settings_dict)
    options = settings["OPTIONS"] = {**TIME_LIMITS, **settings["OPTIONS"]}
    options.pop("pool", None)
    options["isolation_level"] = IsolationLevel.READ_COMMITTED
    if application_name is not None:
        options["application_name"] = application_name[:63]
    settings.update(CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=False, ATOMIC_REQUESTS=False, AUTOCOMMIT=True)
    wrapper = import_string(f"{settings['ENGINE']}.base.DatabaseWrapper")
    connection: DatabaseWrapper = wrapper(settings, alias=using)
    connection.inc_thread_sharing()
    return connection


def limit_waiting(connection: DatabaseWrapper) -> None:
    """Limit how long this Django connection waits on a silent network, unless its settings have such limits."""
    settings = connection.settings_dict
    connection.settings_dict = {**settings, "OPTIONS": {**TIME_LIMITS, **settings["OPTIONS"]}}


def set_limits(connection: DatabaseWrapper, limits: Mapping[str, str]) -> None:
    """Set server settings for this session, whatever their values for role, database and server are. One statement.

    In addition, single statements of the session are READ COMMITTED from now on, like its transactions, and NULL in an
    array is not read as a text. Settings that the server does not know are left out. Behind a pooler nothing is set,
    because the next client of the session would get the settings.
    """
    settings = {**NEEDED, **limits}
    with connection.cursor() as cursor:
        cursor.execute(SET_SETTINGS, (list(settings), list(settings.values()), backend_pid(connection)))
