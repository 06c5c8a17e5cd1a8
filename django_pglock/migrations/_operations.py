"""An operation for SQL about our tables, where the database is PostgreSQL and the routers allow it.

A project may have databases that are not PostgreSQL, and routers that keep our tables out of some databases. All
models have ``required_db_vendor``, so Django's operations do nothing in a database of another vendor. This operation
does the same for plain SQL.
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


class PlainSQL(Operation):
    """Run SQL about the table or the view of one model, where the routers allow the model.

    - ``reverse_sql``: what is run if the migration is reversed; empty: nothing, because the table is dropped next.
    - ``from_tables``: the expressions in the SQL that read another table of this app. It maps a name, which is in
      ``{braces}`` in the SQL, to the model of the table and the expression. In a database without this table the
      expression is NULL.
    """

    reduces_to_sql = True

    def __init__(
        self, model_name: str, sql: str, reverse_sql: str = "", from_tables: dict[str, tuple[str, str]] | None = None
    ) -> None:
        self.model_name = model_name
        self.sql = sql
        self.reverse_sql = reverse_sql
        self.from_tables = from_tables or {}

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Change nothing: none of this is part of a model."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the SQL."""
        sql = self.sql
        for name, (table_of, expression) in self.from_tables.items():
            has_table = _is_wanted(schema_editor, to_state, app_label, table_of)
            sql = sql.replace(f"{{{name}}}", expression if has_table else "NULL")
        if _is_wanted(schema_editor, to_state, app_label, self.model_name):
            schema_editor.execute(sql, params=None)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Run the reverse SQL."""
        if self.reverse_sql and _is_wanted(schema_editor, from_state, app_label, self.model_name):
            schema_editor.execute(self.reverse_sql, params=None)

    def describe(self) -> str:
        """Return the line that ``sqlmigrate`` prints above the SQL."""
        return f"Run SQL about {self.model_name}"


def _is_wanted(schema_editor: Any, state: Any, app_label: str, model_name: str) -> bool:
    # Operation.allow_migrate_model() returns False for every unmanaged model.
    connection, model = schema_editor.connection, state.apps.get_model(app_label, model_name)
    return connection.vendor == VENDOR and bool(router.allow_migrate_model(connection.alias, model))


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
            if isinstance(operation, PlainSQL):
                operation.database_forwards(app.label, editor, None, SimpleNamespace(apps=apps))
