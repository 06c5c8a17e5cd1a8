"""System checks: one function for each problem, a stable id, and a hint that says what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.checks import Warning as Caution
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router

from django_pglock.conf import get_settings, key_function, misspelt_names, redact_hook
from django_pglock.errors import ConfigurationError, model_of
from django_pglock.postgres.sessions import unreadable_styles
from django_pglock.tasks import registry
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.fields import TaskFields

#: The oldest major version that is supported. The version before it works, but is not tested.
OLDEST_SERVER = 15

#: Limits that end a session and release its locks; PostgreSQL 17 and newer have the last one. lock_timeout is not
#: checked, because each statement that waits for a lock sets its own.
SESSION_LIMITS = ("idle_session_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")

#: The only encoding of a database that has each character.
UTF8 = "UTF8"

#: The options of Django's own tasks, and those of a single call.
OF_DJANGO = ("func", "priority", "backend", "queue_name", "run_after", "takes_context", "after", "meta")

#: The options that matter only if there is a second attempt.
OF_RETRIES = ("backoff", "no_retry_on", "retry_on")

#: At most this number of functions is named in a message.
MOST_NAMED = 5

#: One row for each limit that the server has. The columns before the limit are the same in all rows.
READ_SERVER = """
SELECT pg_backend_pid(), current_setting('server_version_num')::int / 10000, pg_is_in_recovery(),
       quote_ident(current_user), name, setting::bigint, source
FROM pg_settings WHERE name = ANY(%s) ORDER BY name
"""


@register("django_pglock")
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """E001: an option of DJANGO_PGLOCK does not exist or has an invalid value."""
    try:
        key_function()
        redact_hook()
    except ConfigurationError as error:
        return [Error(str(error), hint="Correct DJANGO_PGLOCK in your settings.", id="django_pglock.E001")]
    return []


@register("django_pglock")
def check_name_of_settings(**kwargs: Any) -> list[CheckMessage]:
    """W011: a setting that nothing reads has almost the name DJANGO_PGLOCK."""
    return [
        Caution(
            f"The setting {name} has no effect on django_pglock, which reads DJANGO_PGLOCK.",
            hint=f"Rename {name} to DJANGO_PGLOCK, or silence this check if another package reads {name}.",
            id="django_pglock.W011",
        )
        for name in misspelt_names()
    ]


@register("django_pglock")
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    """E002: an alias that locks or tasks use is not in DATABASES, or is not PostgreSQL."""
    problems: list[CheckMessage] = []
    for alias, source in sorted(_aliases().items()):
        if alias not in connections.settings:
            message = f"{source} names the database {alias!r}, which is not in DATABASES."
            hint = f"Name a PostgreSQL database in {source}."
        elif (vendor := connections[alias].vendor) != "postgresql":
            found = "not set" if vendor == "unknown" else vendor
            message = f"DATABASES[{alias!r}] is {found}, and the locks and tasks of django_pglock need PostgreSQL."
            hint = (
                f"Set DATABASES[{alias!r}]['ENGINE'] to 'django.db.backends.postgresql', or name the alias of a "
                f"PostgreSQL database in {source}."
            )
        else:
            continue
        problems.append(Error(message, hint=hint, id="django_pglock.E002"))
    return problems


@register("django_pglock")
def check_atomic_requests(**kwargs: Any) -> list[CheckMessage]:
    """W002: SCOPE is "session", but every request runs in a transaction, where session locks are refused."""
    try:
        wanted = get_settings()
    except ConfigurationError:
        return []
    if wanted.SCOPE != "session" or not settings.DATABASES.get(wanted.USING, {}).get("ATOMIC_REQUESTS"):
        return []
    return [
        Caution(
            "ATOMIC_REQUESTS runs every view in a transaction, in which locks of the scope 'session' are refused.",
            hint="Set DJANGO_PGLOCK['SCOPE'] to 'auto', or decorate views that take locks with non_atomic_requests.",
            id="django_pglock.W002",
        )
    ]


@register("django_pglock")
def check_sessions_that_end(**kwargs: Any) -> list[CheckMessage]:
    """W005: SCOPE is "session", and Django closes the connection after each request.

    With this scope acquire() may hold a lock for longer than a request. A with statement, a decorator and lock_view
    release their locks before the end of the request, whatever CONN_MAX_AGE is.
    """
    try:
        wanted = get_settings()
    except ConfigurationError:
        return []
    database = settings.DATABASES.get(wanted.USING, {})
    has_pool = bool(database.get("OPTIONS", {}).get("pool"))
    if wanted.SCOPE != "session" or has_pool or database.get("CONN_MAX_AGE", 0) != 0:
        return []
    return [
        Caution(
            f"Database {wanted.USING!r} has CONN_MAX_AGE = 0: Django closes the connection after each request and at "
            "each close_old_connections(). A session lock that acquire() holds for longer is lost with it.",
            hint=f"Set DATABASES[{wanted.USING!r}]['CONN_MAX_AGE'] = None, or silence this check if every lock is "
            "taken by a with statement, a decorator or lock_view.",
            id="django_pglock.W005",
        )
    ]


@register(Tags.database)
def check_server(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E005, W001, W003, W004, W006 and W007: found by one query to each server; none if it cannot be reached."""
    return _check_each(databases, _check_one)


@register(Tags.database)
def check_texts_of_server(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E012 and E013: the server sends dates as psycopg cannot read them, or cannot store each character."""
    return _check_each(databases, _check_texts)


@register(Tags.database, deploy=True)
def check_dead_clients(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W008: the server does not notice that a client which waits for a lock has died.

    Only with ``check --deploy``: it is PostgreSQL's default, and does no harm in development.
    """
    return _check_each(databases, _check_dead_clients)


def _check_each(
    databases: Sequence[str] | None, check: Callable[[str, str], Iterable[CheckMessage]]
) -> list[CheckMessage]:
    """Run a check for each of the aliases that locks or tasks use, with the setting that names it."""
    problems: list[CheckMessage] = []
    for alias, source in sorted(_aliases().items()):
        if alias in (databases or []) and connections[alias].vendor == "postgresql":
            # Everything else reports a server that cannot be reached, and E001 reports wrong settings.
            with suppress(DatabaseError, ConfigurationError):
                problems += check(alias, source)
    return problems


def _check_one(alias: str, source: str) -> Iterable[CheckMessage]:
    connection: Any = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(READ_SERVER, ([*SESSION_LIMITS, "statement_timeout"],))
        rows = cursor.fetchall()
    pid, version, is_standby, role = rows[0][:4]
    yield from _check_age(alias, version)
    if _is_pooled(connection, pid) and get_settings().SCOPE != "transaction":
        yield Caution(
            f"Database {alias!r} is reached through a pooler: the process id that libpq knows is not that of the "
            "server process. In transaction mode a session lock would be taken in one session and released in another.",
            hint="Set DJANGO_PGLOCK['SCOPE'] = 'transaction' and run runlockworker with --no-listen, or give its "
            "processes the server's own address.",
            id="django_pglock.W001",
        )
    if is_standby:
        yield Caution(
            f"Database {alias!r} is a standby: a lock taken there does not exclude clients of the primary, and no "
            "task can be written.",
            hint=f"Name the primary's alias in {source}, or let DATABASES[{alias!r}] connect only to the primary: "
            "OPTIONS = {'target_session_attrs': 'read-write'}.",
            id="django_pglock.W004",
        )
    for name, milliseconds, origin in (row[4:] for row in rows):
        yield from _check_limit(alias, role, name, milliseconds, origin)


def _check_age(alias: str, version: int) -> Iterable[CheckMessage]:
    if version < OLDEST_SERVER - 1:
        hint = f"Upgrade to PostgreSQL {OLDEST_SERVER} or newer."
        yield Error(f"Database {alias!r} is PostgreSQL {version}.", hint=hint, id="django_pglock.E005")
    elif version < OLDEST_SERVER:
        hint = f"It is expected to work, but only PostgreSQL {OLDEST_SERVER} and newer are tested."
        yield Caution(f"Database {alias!r} is PostgreSQL {version}.", hint=hint, id="django_pglock.W003")


def _check_limit(alias: str, role: str, name: str, milliseconds: int, origin: str) -> Iterable[CheckMessage]:
    if milliseconds == 0:
        return
    found = f"Database {alias!r} has {name} = {milliseconds / 1000:g} s (from: {origin})"
    what = "a wait for" if name == "statement_timeout" else "work under"
    hint = f"If {what} a lock may take longer: {_how_to_set(alias, role, name, '0')}"
    if name == "statement_timeout":
        yield Caution(
            f"{found}. It ends a wait for a lock, without a timeout or in a transaction, with QueryCanceled "
            "instead of LockNotAvailable.",
            hint=hint,
            id="django_pglock.W007",
        )
    elif name != "idle_session_timeout" or get_settings().SCOPE != "transaction":
        yield Caution(
            f"{found}. It ends sessions that still need their locks, and other sessions take these locks.",
            hint=hint,
            id="django_pglock.W006",
        )


def _check_texts(alias: str, source: str) -> Iterable[CheckMessage]:
    connection: Any = connections[alias]
    connection.ensure_connection()
    if style := unreadable_styles(connection).get("DateStyle"):
        role = connection.connection.info.user
        yield Error(
            f"Database {alias!r} has DateStyle = '{style}'. psycopg, and so Django, reads dates only in the style ISO.",
            hint=_how_to_set(alias, f'"{role}"', "DateStyle", "ISO"),
            id="django_pglock.E012",
        )
    encoding = connection.connection.info.parameter_status("server_encoding") or UTF8
    if encoding != UTF8 and router.allow_migrate(alias, "django_pglock"):
        yield Error(
            f"Database {alias!r} has the encoding {encoding}. The tables of django_pglock need {UTF8}: other encodings "
            "do not have every character.",
            hint="Create a database with the encoding UTF8, and restore a dump of this one in it: "
            "CREATE DATABASE name ENCODING 'UTF8' TEMPLATE template0;",
            id="django_pglock.E013",
        )


def _check_dead_clients(alias: str, source: str) -> Iterable[CheckMessage]:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('client_connection_check_interval'), quote_ident(current_user)")
        interval, role = cursor.fetchone()
    if interval == "0":
        yield Caution(
            f"Database {alias!r} has no client_connection_check_interval: a client that is killed while it waits for "
            "a lock stays in the queue, and others wait behind it.",
            hint=_how_to_set(alias, role, "client_connection_check_interval", "2s"),
            id="django_pglock.W008",
        )


def _how_to_set(alias: str, role: str, name: str, value: str) -> str:
    return (
        f"Add '-c {name}={value}' to DATABASES[{alias!r}]['OPTIONS']['options']; behind a pooler, type in psql: "
        f"ALTER ROLE {role} SET {name} = '{value}';"
    )


def _is_pooled(connection: Any, pid: int) -> bool:
    return bool(connection.connection.info.backend_pid != pid)


@register("django_pglock")
def check_task_database(**kwargs: Any) -> list[CheckMessage]:
    """W009: tasks are not in the default database, so enqueueing is not a part of the data's transaction."""
    return [
        Caution(
            f"{source} stores tasks in {alias!r}: a task that is enqueued in a transaction of another database can run "
            "before that transaction commits, and stays if that transaction is rolled back.",
            hint="Call enqueue_on_commit() instead of enqueue() where the data is in another database.",
            id="django_pglock.W009",
        )
        for alias, source in sorted(_aliases_of_tasks().items())
        if alias != DEFAULT_DB_ALIAS
    ]


@register("django_pglock")
def check_options_without_effect(**kwargs: Any) -> list[CheckMessage]:
    """W010: functions have our options, but another package's backend, which ignores them. No worker enqueues ticks."""
    found: dict[str, list[str]] = {}
    if not _is_tasks_set() and getattr(settings, "ROOT_URLCONF", None):
        # Without TASKS the modules called tasks are not imported, but the views import them. Django reports its errors.
        with suppress(Exception):
            import_module(settings.ROOT_URLCONF)
    for task in registry.definitions():
        if not task.is_own and not hasattr(task.get_backend(), "database") and (names := _own_options(task)):
            found.setdefault(task.backend, []).append(f"{task.module_path} ({', '.join(names)})")
    return [
        Caution(
            f"{_what_is(alias)}, with which these options of @task have no effect: {_some(texts)}.",
            hint=f"Set BACKEND of TASKS[{alias!r}] to django_pglock.backend.PostgresBackend, or name another backend "
            "in @task. Silence this check in settings for tests that are meant to use this backend.",
            id="django_pglock.W010",
        )
        for alias, texts in sorted(found.items())
    ]


@register("django_pglock")
def check_retry_options(**kwargs: Any) -> list[CheckMessage]:
    """W014: functions say when they are retried, but have a single attempt, so they never are."""
    found = [
        f"{task.module_path} ({', '.join(names)})"
        for task in registry.definitions()
        if task.max_attempts == 1 and (names := [name for name in OF_RETRIES if name in _own_options(task)])
    ]
    if not found:
        return []
    return [
        Caution(
            f"These options of @task have no effect, because max_attempts is 1: {_some(found)}.",
            hint="Set max_attempts, which counts the first attempt. Silence this check if all calls set it by using().",
            id="django_pglock.W014",
        )
    ]


def _some(texts: list[str]) -> str:
    more = len(texts) - MOST_NAMED
    return "; ".join(texts[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _own_options(task: TaskFields) -> list[str]:
    """Return the names of the options of a function that Django's tasks do not have."""
    own = [each for each in fields(TaskFields) if each.init and each.name not in OF_DJANGO]
    return sorted(each.name for each in own if getattr(task, each.name) != each.default)


def _is_tasks_set() -> bool:
    # Its type does not know the methods of the object behind it.
    loaded: Any = settings
    return bool(loaded.is_overridden("TASKS"))


def _what_is(alias: str) -> str:
    name = type(task_backends[alias]).__name__
    return f"TASKS[{alias!r}] is {name}" if _is_tasks_set() else f"TASKS is not set, so the backend is {name}"


@register("django_pglock")
def check_tables(**kwargs: Any) -> list[CheckMessage]:
    """E006: a router does not allow the table of tasks in the database that TASKS names."""
    return [
        Error(
            f"{source} stores tasks in {alias!r}, but a router of the project does not allow the table of tasks there.",
            hint=f"Let allow_migrate return True for {alias!r} and the app django_pglock, and run: "
            f"manage.py migrate --database {alias}",
            id="django_pglock.E006",
        )
        for alias, source in sorted(_aliases_of_tasks().items())
        if not router.allow_migrate_model(alias, model_of("Task"))
    ]


@register("django_pglock")
def check_database_of_pages(**kwargs: Any) -> list[CheckMessage]:
    """W012: the routers lead to a database in which TASKS stores no tasks, so the admin shows none."""
    stored, shown = sorted(_aliases_of_tasks()), router.db_for_write(model_of("Task"))
    if not stored or shown in stored:
        return []
    return [
        Caution(
            f"TASKS stores tasks in {' and '.join(map(repr, stored))}, but the routers of the project lead to "
            f"{shown!r}. The admin and Task.objects show the tables there, in which no task is.",
            hint="Add a router to DATABASE_ROUTERS whose db_for_read and db_for_write return "
            f"{stored[0]!r} for the models of django_pglock.",
            id="django_pglock.W012",
        )
    ]


@register("django_pglock")
def check_tables_of_locks(**kwargs: Any) -> list[CheckMessage]:
    """W013: a router does not allow the view of locks or the table of leases in the database USING."""
    try:
        using = get_settings().USING
    except ConfigurationError:
        return []
    missing = [name for name in ("AdvisoryLock", "Lease") if not router.allow_migrate_model(using, model_of(name))]
    if not missing:
        return []
    return [
        Caution(
            f"DJANGO_PGLOCK['USING'] takes locks and leases in {using!r}, but a router of the project does not allow "
            f"{' and '.join(missing)} there. Leases, the command locks and the pages of locks need them.",
            hint=f"Let allow_migrate return True for {using!r} and these models of django_pglock, or name the database "
            "that has them in DJANGO_PGLOCK['USING'].",
            id="django_pglock.W013",
        )
    ]


def _aliases() -> dict[str, str]:
    """Return the aliases that locks and tasks use, each with the setting that names it."""
    try:
        aliases = {get_settings().USING: "DJANGO_PGLOCK['USING']"}
    except ConfigurationError:
        aliases = {}
    return {**_aliases_of_tasks(), **aliases}


def _aliases_of_tasks() -> dict[str, str]:
    """Return the aliases that tasks use, each with the first setting that names it."""
    aliases: dict[str, str] = {}
    for name in task_backends:
        # Django makes each backend for its own checks, which report wrong options.
        with suppress(ImproperlyConfigured):
            if (alias := getattr(task_backends[name], "database", None)) is not None:
                aliases.setdefault(alias, f"TASKS[{name!r}]['OPTIONS']['database']")
    return aliases
