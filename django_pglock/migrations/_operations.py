"""Operations for SQL about our tables, where the database is PostgreSQL and the routers allow it.

A project may have databases that are not PostgreSQL, and routers that keep our tables out of some databases. All
models have ``required_db_vendor``, so Django's operations do nothing in a database of another vendor. The operations of
this file do the same for plain SQL.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from django.apps import apps
from django.db import connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation

VENDOR = "postgresql"


class TableSQL(Operation):
    """Run SQL about the table of one model, in each database that has this table."""

    reduces_to_sql = True

    def __init__(self, model_name: str, sql: str) -> None:
        self.model_name = model_name
        self.sql = sql

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: storage parameters are not part of a model."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL."""
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.execute(self.sql, params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Do nothing: the table is dropped next."""

    def describe(self) -> str:
        """Return the line that ``sqlmigrate`` prints above the SQL."""
        return f"Set storage parameters of {self.model_name}"


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
        for operation in import_module(f"{__package__}.0001_initial").Migration.operations:
            if isinstance(operation, (TableSQL, CreateView)):
                operation.database_forwards(app.label, editor, None, SimpleNamespace(apps=apps))
