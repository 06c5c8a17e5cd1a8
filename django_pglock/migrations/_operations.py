"""Operations for tables that are in use, and for SQL where the database is PostgreSQL and the routers allow it.

A project may have databases that are not PostgreSQL, and routers that keep our tables out of some databases. All
models have ``required_db_vendor``, so Django's operations do nothing in a database of another vendor. The operations of
this file do the same for plain SQL.

Later migrations are applied while workers work. ``AddFieldOnline``, ``AddCheckOnline`` and ``AddIndexOnline`` keep no
statement of a worker waiting, whatever other transactions do.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from django.apps import apps
from django.contrib.postgres.operations import AddConstraintNotValid, AddIndexConcurrently
from django.db import OperationalError, connections, migrations, router, transaction
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from psycopg.errors import LockNotAvailable

from django_pglock.loggers import get_logger

logger = get_logger(__name__)

VENDOR = "postgresql"
#: How long a migration waits for a table, and the seconds until it tries again. Between two attempts it blocks no other
#: session.
LOCK_TIMEOUT, LOCK_PAUSE = "100ms", 1.0

LIMIT_WAIT = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"
RESTORE_WAIT = "SELECT set_config('lock_timeout', %s, true)"
#: Whether there is an index of this name, and whether it is complete.
INDEX_STATE = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)"


class AddFieldOnline(migrations.AddField):
    """Add a column without making other transactions wait for longer than ``LOCK_TIMEOUT``.

    ALTER TABLE takes a moment, but first it waits for all transactions that use the table, and all later statements
    would wait behind it. So this operation waits only for a moment, lets the others go first, and tries again. Make it
    the last operation of its migration, because it holds the lock on the table until the end of the migration.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Add the column."""
        _lock_for(self, schema_editor, to_state.apps.get_model(app_label, self.model_name))
        super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the column, which waits as well."""
        _lock_for(self, schema_editor, from_state.apps.get_model(app_label, self.model_name))
        super().database_backwards(app_label, schema_editor, from_state, to_state)


class AddCheckOnline(AddConstraintNotValid):
    """Add a CHECK constraint for rows that are written from now on, and wait for the table as ``AddFieldOnline`` does.

    Make it the last operation of its migration, too. In the next migration, ``ValidateConstraint`` reads all rows.
    Before both of them, ``ChangeRows`` makes the rows comply: no statement can change a row that does not.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Add the constraint."""
        _lock_for(self, schema_editor, from_state.apps.get_model(app_label, self.model_name))
        super().database_forwards(app_label, schema_editor, from_state, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the constraint."""
        _lock_for(self, schema_editor, to_state.apps.get_model(app_label, self.model_name))
        super().database_backwards(app_label, schema_editor, from_state, to_state)


def _lock_for(operation: Operation, schema_editor: Any, model: Any) -> None:
    """Lock the table for an operation. Wait for a moment, let the others go first, and try again."""
    if schema_editor.collect_sql or not operation.allow_migrate_model(schema_editor.connection.alias, model):
        return
    attempts = 0
    while not _is_locked(schema_editor, model._meta.db_table):
        if attempts == 0:
            logger.warning(
                "The migration waits for transactions that use the table %s; pg_stat_activity lists them.",
                model._meta.db_table,
            )
        attempts += 1
        time.sleep(LOCK_PAUSE)


def _is_locked(schema_editor: Any, table: str) -> bool:
    """Lock the table until the end of the transaction. Return False if that takes longer than ``LOCK_TIMEOUT``."""
    connection = schema_editor.connection
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            cursor.execute(LIMIT_WAIT, [LOCK_TIMEOUT])
            [(before, _)] = cursor.fetchall()
            cursor.execute(f"LOCK TABLE {schema_editor.quote_name(table)} IN ACCESS EXCLUSIVE MODE")
            cursor.execute(RESTORE_WAIT, [before])
    except OperationalError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            return False
        raise
    return True


class AddIndexOnline(AddIndexConcurrently):
    """Create an index concurrently, also after an interrupted attempt, which leaves an index that is not valid.

    If the index is complete already, because the migration was interrupted just before Django recorded it, nothing is
    done.
    """

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Create the index, unless a complete one is there."""
        model = to_state.apps.get_model(app_label, self.model_name)
        if not schema_editor.collect_sql and self.allow_migrate_model(schema_editor.connection.alias, model):
            with schema_editor.connection.cursor() as cursor:
                cursor.execute(INDEX_STATE, [schema_editor.quote_name(self.index.name)])
                found = cursor.fetchone()
            if found == (True,):
                return
            if found:
                schema_editor.remove_index(model, self.index, concurrently=True)
        super().database_forwards(app_label, schema_editor, from_state, to_state)


class TableSQL(Operation):
    """Run SQL about the table of one model, in each database that has this table."""

    reduces_to_sql = True

    def __init__(self, model_name: str, forwards: str, backwards: str) -> None:
        self.model_name = model_name
        self.forwards = forwards
        self.backwards = backwards

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: storage parameters are not part of a model."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL."""
        self._run(self.forwards, app_label, schema_editor, to_state)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL that reverts the change."""
        self._run(self.backwards, app_label, schema_editor, to_state)

    def describe(self) -> str:
        """Return the line that ``sqlmigrate`` prints above the SQL."""
        return f"Set storage parameters of {self.model_name}"

    def _run(self, sql: str, app_label: str, schema_editor: Any, state: Any) -> None:
        model = state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.execute(sql, params=None)


class ChangeRows(TableSQL):
    """Change a few rows of the table of one model, such as those that a new constraint refuses.

    The statement may read the whole table, and locks only the rows that it changes. Nothing is changed back.
    """

    def __init__(self, model_name: str, sql: str) -> None:
        super().__init__(model_name, sql, "")

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Do nothing."""

    def describe(self) -> str:
        """Return the line that ``sqlmigrate`` prints above the SQL."""
        return f"Change rows of {self.model_name}"


class CreateView(Operation):
    """Create the view that an unmanaged model reads, where the routers allow the model.

    ``from_tables`` are the expressions of the view that read a table of this app. It maps a name, which is in
    ``{braces}`` in the SQL, to the model of the table and the expression. In a database without this table the
    expression is NULL.
    """

    reduces_to_sql = True

    def __init__(self, model_name: str, sql: str, from_tables: dict[str, tuple[str, str]]) -> None:
        self.model_name = model_name
        self.sql = sql
        self.from_tables = from_tables

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: the model is in the state already."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Create the view."""
        if self._is_wanted(app_label, schema_editor, to_state):
            schema_editor.execute(self._sql_for(app_label, schema_editor, to_state), params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the view."""
        if self._is_wanted(app_label, schema_editor, from_state):
            table = to_state.apps.get_model(app_label, self.model_name)._meta.db_table
            schema_editor.execute(f"DROP VIEW {schema_editor.quote_name(table)}", params=None)

    def describe(self) -> str:
        """Return the line that ``sqlmigrate`` prints above the SQL."""
        return f"Create the view of {self.model_name}"

    def _is_wanted(self, app_label: str, schema_editor: Any, state: Any) -> bool:
        # Operation.allow_migrate_model() returns False for every unmanaged model.
        connection, model = schema_editor.connection, state.apps.get_model(app_label, self.model_name)
        return connection.vendor == VENDOR and bool(router.allow_migrate_model(connection.alias, model))

    def _sql_for(self, app_label: str, schema_editor: Any, state: Any) -> str:
        alias, sql = schema_editor.connection.alias, self.sql
        for name, (table_of, expression) in self.from_tables.items():
            has_table = self.allow_migrate_model(alias, state.apps.get_model(app_label, table_of))
            sql = sql.replace(f"{{{name}}}", expression if has_table else "NULL")
        return sql


def run_without_migrations(using: str) -> None:
    """Run the SQL of this app's migrations in a database whose tables were made from the models.

    ``MIGRATION_MODULES`` can disable migrations, as ``--nomigrations`` of pytest-django does. Called after each
    ``post_migrate``, which ``flush`` sends, too. Does nothing if the app has migrations, or if the view exists.
    """
    app = apps.get_app_config("django_pglock")
    if MigrationLoader.migrations_module(app.label)[0] is not None or connections[using].vendor != VENDOR:
        return
    view = app.get_model("AdvisoryLock")._meta.db_table
    if view in connections[using].introspection.table_names(include_views=True):
        return
    with connections[using].schema_editor() as editor:
        for operation in _operations_with_sql():
            operation.database_forwards(app.label, editor, None, SimpleNamespace(apps=apps))


def _operations_with_sql() -> Iterator[TableSQL | CreateView]:
    package = import_module(__package__)
    for name in sorted(each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] not in "_~"):
        for operation in import_module(f"{__package__}.{name}").Migration.operations:
            if isinstance(operation, (TableSQL, CreateView)):
                yield operation
