"""Finds pending migrations, because a deployment may start workers before it migrates the database."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from django.apps import apps
from django.db import ProgrammingError, connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder
from psycopg.errors import InsufficientPrivilege

APP = "django_pglock"
# Those of the names of tables that exist. Django's introspection would describe all tables and views of the project.
EXISTING_TABLES = "SELECT name FROM unnest(%s::text[]) AS name WHERE to_regclass(quote_ident(name)) IS NOT NULL"


def pending_migrations(using: str) -> list[str]:
    """Return the names of the migrations of this package that are not applied to the database, in order.

    The list is empty if the project does not use these migrations: ``MIGRATION_MODULES`` disables them, or all tables
    of the package exist and no migration is recorded. It is also empty if the role may not read the table of
    migrations.
    """
    module, _ = MigrationLoader.migrations_module(APP)
    if module is None:
        return []
    package = import_module(module)
    names = {each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] not in "_~"}
    connection = connections[using]
    # All tables are checked, and before the recorded migrations are read, because "migrate" may run at the same time.
    # It may have created only some tables, or may create them between the two queries.
    tables, records = _tables(using), MigrationRecorder.Migration._meta.db_table
    existing = _existing(connection, [*tables, records])
    try:
        applied = _applied(connection) if records in existing else set()
    except ProgrammingError as error:
        if isinstance(error.__cause__, InsufficientPrivilege):
            return []
        raise
    if not applied and tables <= existing:
        return []
    return sorted(names - applied)


def _existing(connection: Any, names: list[str]) -> set[str]:
    with connection.cursor() as cursor:
        cursor.execute(EXISTING_TABLES, [names])
        return {name for (name,) in cursor.fetchall()}


def _applied(connection: Any) -> set[str]:
    """Return the names of the migrations of this package that are recorded in the database."""
    return set(MigrationRecorder(connection).migration_qs.filter(app=APP).values_list("name", flat=True))


def _tables(using: str) -> set[str]:
    """Return the names of the tables that the package has in this database."""
    models = [model for model in apps.get_app_config(APP).get_models() if model._meta.managed]
    return {model._meta.db_table for model in models if router.allow_migrate_model(using, model)}
