"""System checks: one function for each problem, a stable id, and a hint that says what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, register
from django.core.checks import Warning as Caution
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, router
from django.utils.module_loading import autodiscover_modules

from django_pglock.conf import get_settings, key_function, redact_hook
from django_pglock.errors import ConfigurationError, model_of
from django_pglock.postgres.connections import backend_pid
from django_pglock.tasks import registry
from django_pglock.tasks.compat import Task, task_backends
from django_pglock.tasks.fields import OF_FUNCTION, TaskFields

#: The oldest major version that is supported. Django refuses versions that are older than its own limit.
OLDEST_SERVER = 15

#: Limits that end a wait, or a session with its locks; PostgreSQL 17 and newer have transaction_timeout. Without
#: lock_timeout, because each statement that waits for a lock sets its own.
LIMITS = ["idle_session_timeout", "idle_in_transaction_session_timeout", "transaction_timeout", "statement_timeout"]

#: The options of functions that Django's tasks do not have, and those that matter only if there is a second attempt.
OWN_OPTIONS = sorted({*OF_FUNCTION} - {each.name for each in fields(Task)} - {"meta"})
OF_RETRIES = ("backoff", "no_retry_on", "retry_on")

#: How the warning about options without effect begins if the project has forgotten TASKS.
NO_TASKS = "The settings have no TASKS, so enqueue() calls these functions at once, and ignores"

#: At most this number of functions is named in a message.
MOST_NAMED = 5

#: One row for each limit that the server has. The columns before the limit are the same in all rows.
READ_SERVER = """
SELECT pg_backend_pid(), current_setting('server_version_num')::int / 10000, pg_is_in_recovery(),
       quote_ident(current_user), name, setting::bigint, source
FROM pg_settings WHERE name = ANY(%s) ORDER BY name
"""

Problems = Iterator[CheckMessage]
Check = Callable[..., list[CheckMessage]]


def problem(number: str, text: str, hint: str) -> CheckMessage:
    """Return an error or a warning."""
    kind = Error if number.startswith("E") else Caution
    return kind(text, hint=hint, id=f"django_pglock.{number}")


def _all(problems: Problems) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    # E001 reports wrong settings, and everything else reports a server that cannot be reached.
    with suppress(ConfigurationError, DatabaseError):
        found.extend(problems)
    return found


def _check(find: Callable[[], Problems]) -> Check:
    """Register a check of the code and its settings."""
    return register(lambda **kwargs: _all(find()), "django_pglock")


def _check_of_servers(**options: Any) -> Callable[[Callable[[str, str], Problems]], Check]:
    """Return what registers a check of each alias that locks or tasks use, and of the setting that names it."""

    def decorate(find: Callable[[str, str], Problems]) -> Check:
        def check(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
            used = [each for each in sorted(_aliases().items()) if each[0] in (databases or [])]
            asked = [each for each in used if connections[each[0]].vendor == "postgresql"]
            return [message for alias, source in asked for message in _all(find(alias, source))]

        return register(check, Tags.database, **options)

    return decorate


@_check
def check_settings() -> Problems:
    """E001: an option of DJANGO_PGLOCK does not exist or has an invalid value."""
    try:
        key_function()
        redact_hook()
    except ConfigurationError as error:
        yield problem("E001", str(error), "Correct DJANGO_PGLOCK in your settings.")


@_check
def check_databases() -> Problems:
    """E002: an alias that locks or tasks use is not in DATABASES, or is not PostgreSQL."""
    for alias, source in sorted(_aliases().items()):
        vendor = connections[alias].vendor if alias in connections.settings else "missing"
        if vendor != "postgresql":
            found = "not set" if vendor == "unknown" else vendor
            yield problem(
                "E002",
                f"DATABASES[{alias!r}] is {found}, and the locks and tasks of django_pglock need PostgreSQL.",
                f"Set DATABASES[{alias!r}]['ENGINE'] to 'django.db.backends.postgresql', or name the alias of a "
                f"PostgreSQL database in {source}.",
            )


@_check_of_servers()
def check_server(alias: str, source: str) -> Problems:
    """W001, W003, W004 and W006: found by one query to each server; none if it cannot be reached."""
    connection: Any = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(READ_SERVER, (LIMITS,))
        rows = cursor.fetchall()
    pid, version, is_standby, role = rows[0][:4]
    if version < OLDEST_SERVER:
        yield problem("W003", f"Database {alias!r} is PostgreSQL {version}.", f"Upgrade to {OLDEST_SERVER} or newer.")
    if pid != backend_pid(connection) and get_settings().SCOPE != "transaction":
        yield problem(
            "W001",
            f"Database {alias!r} is reached through a pooler: the process id that libpq knows is not that of the "
            "server process. In transaction mode a session lock would be taken in one session and released in another.",
            "Set DJANGO_PGLOCK['SCOPE'] = 'transaction'. Give the processes of runlockworker the server's own address "
            "if you can, or they poll.",
        )
    if is_standby:
        yield problem(
            "W004",
            f"Database {alias!r} is a standby: a lock taken there does not exclude clients of the primary, and no "
            "task can be written.",
            f"Name the primary's alias in {source}, or let DATABASES[{alias!r}] connect only to the primary: "
            "OPTIONS = {'target_session_attrs': 'read-write'}.",
        )
    for name, milliseconds, origin in (row[4:] for row in rows):
        if milliseconds and (name != "idle_session_timeout" or get_settings().SCOPE != "transaction"):
            yield problem(
                "W006",
                f"Database {alias!r} has {name} = {milliseconds / 1000:g} s (from: {origin}). It ends waits for locks "
                "with QueryCanceled, or sessions that still need their locks, and other sessions take these locks.",
                f"If work under a lock, or a wait for one, may take longer: {_how_to_set(alias, role, name, '0')}",
            )


@_check_of_servers(deploy=True)
def check_dead_clients(alias: str, source: str) -> Problems:
    """W008: the server does not notice that a client which waits for a lock has died.

    Only with ``check --deploy``: it is PostgreSQL's default, and does no harm in development.
    """
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_setting('client_connection_check_interval'), quote_ident(current_user)")
        interval, role = cursor.fetchone()
    if interval == "0":
        yield problem(
            "W008",
            f"Database {alias!r} has no client_connection_check_interval: a client that is killed while it waits for "
            "a lock stays in the queue, and others wait behind it.",
            _how_to_set(alias, role, "client_connection_check_interval", "2s"),
        )


def _how_to_set(alias: str, role: str, name: str, value: str) -> str:
    return (
        f"Add '-c {name}={value}' to DATABASES[{alias!r}]['OPTIONS']['options']; behind a pooler, type in psql: "
        f"ALTER ROLE {role} SET {name} = '{value}';"
    )


@_check
def check_task_databases() -> Problems:
    """W009 and E006: tasks are not in the data's database, or a router does not allow their table there."""
    for alias, source in sorted(_aliases_of_tasks().items()):
        if alias != DEFAULT_DB_ALIAS:
            yield problem(
                "W009",
                f"{source} stores tasks in {alias!r}: a task that is enqueued in a transaction of another database can "
                "run before that transaction commits, and stays if that transaction is rolled back.",
                "Call enqueue_on_commit() instead of enqueue() where the data is in another database.",
            )
        if not router.allow_migrate_model(alias, model_of("Task")):
            yield problem(
                "E006",
                f"{source} stores tasks in {alias!r}, but a router of the project does not allow the table of tasks "
                "there.",
                f"Let allow_migrate return True for {alias!r} and the app django_pglock, and run: "
                f"manage.py migrate --database {alias}",
            )


@_check
def check_options_without_effect() -> Problems:
    """W010: functions have our options, but another package's backend, which ignores them. No worker enqueues ticks."""
    # Without TASKS nothing has imported the modules of the functions. Django reports errors of the views.
    with suppress(Exception):
        import_module(settings.ROOT_URLCONF)
    with suppress(Exception):
        autodiscover_modules("tasks")
    others = [
        each for each in registry.definitions() if not each.is_own and not hasattr(each.get_backend(), "database")
    ]
    if text := _changed(others, OWN_OPTIONS):
        is_set: bool = settings.is_overridden("TASKS")  # type: ignore[misc]
        yield problem(
            "W010",
            ("The backends of these functions in TASKS ignore" if is_set else NO_TASKS)
            + f" these options of @task: {text}.",
            "Set BACKEND in TASKS to django_pglock.backend.PostgresBackend, or name another backend in @task. Silence "
            "this check in settings for tests that are meant to use this backend.",
        )


@_check
def check_retry_options() -> Problems:
    """W014: functions say when they are retried, but have a single attempt, so they never are."""
    if text := _changed([each for each in registry.definitions() if each.max_attempts == 1], OF_RETRIES):
        yield problem(
            "W014",
            f"These options of @task have no effect, because max_attempts is 1: {text}.",
            "Set max_attempts, which counts the first attempt. Silence this check if all calls set it by using().",
        )


def _changed(tasks: Sequence[TaskFields], names: Sequence[str]) -> str:
    """Return which of these functions have which of these options with another value than the default."""
    defaults, changed = {each.name: each.default for each in fields(TaskFields)}, {}
    for task in tasks:
        usual = {**defaults, **getattr(task.get_backend(), "defaults", {})}
        changed[task.module_path] = [name for name in names if getattr(task, name) != usual[name]]
    found = [f"{path} ({', '.join(options)})" for path, options in changed.items() if options]
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return "; ".join(found[:MOST_NAMED] + more)


@_check
def check_database_of_pages() -> Problems:
    """W012: the routers lead to a database in which TASKS stores no tasks, so the admin shows none."""
    stored, shown = sorted(_aliases_of_tasks()), router.db_for_write(model_of("Task"))
    if stored and shown not in stored:
        yield problem(
            "W012",
            f"TASKS stores tasks in {' and '.join(map(repr, stored))}, but the routers of the project lead to "
            f"{shown!r}. The admin and Task.objects show the tables there, in which no task is.",
            "Add a router to DATABASE_ROUTERS whose db_for_read and db_for_write return "
            f"{stored[0]!r} for the models of django_pglock.",
        )


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
