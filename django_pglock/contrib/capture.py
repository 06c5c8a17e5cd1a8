"""Capture every change of a table as tasks, by triggers: ``pip install "django-pglock-tasks[capture]"``.

A trigger of django-pgtrigger enqueues the tasks in the transaction of the change, whether the ORM makes it, plain SQL,
COPY, or another program. ``makemigrations`` writes the triggers into the migrations of the model's app::

    INSTALLED_APPS = [..., "pgtrigger", "django_pglock"]

    class Product(models.Model):
        name = models.CharField(max_length=100)
        capture = Capture("shop.tasks.reindex", fields=["name"])

    @task
    def reindex(ids):  # in shop/tasks.py
        ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pgtrigger
from django.apps import apps
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import FieldDoesNotExist, FieldError
from django.db import connections, models, router
from django.db.models.signals import class_prepared
from django.db.models.sql.query import Query
from django.utils.module_loading import import_string
from pgtrigger import compiler

from django_pglock.errors import NOT_INSTALLED, LockKeyError, TaskOptionError
from django_pglock.store.capture import OLD_ROW, Captured, Columns, body_of, identifier, literal
from django_pglock.tasks.compat import InvalidTask
from django_pglock.tasks.definition import PostgresTask

if TYPE_CHECKING:
    from django_pglock.tasks.definition import TaskFunction

#: The operations that can be captured.
OPERATIONS: dict[str, pgtrigger.Operation] = {
    "insert": pgtrigger.Insert,
    "update": pgtrigger.Update,
    "delete": pgtrigger.Delete,
    "truncate": pgtrigger.Truncate,
}
#: Types of fields whose values may be part of a key.
PLAIN = (models.IntegerField, models.UUIDField)
#: The quotes of the function's text.
QUOTES = "$capture$"


class Capture:
    """Declared on a model, it makes a task of each change of the model's table, in the transaction of the change.

    - ``task``: a task function, with ``using()`` if need be, or the path of one, such as ``"shop.tasks.reindex"``. The
      function has any of these parameters: ``ids``, a list of the ids of changed rows, or ``id``, one of them;
      ``operation``, which is ``"insert"``, ``"update"``, ``"delete"`` or ``"truncate"``; ``model``, such as
      ``"shop.product"``; and ``schema``, the schema of the table. With ``ids`` one statement makes a task for each
      ``batch_size`` ids, with ``id`` one for each id, and with neither one.
    - ``on``: what is captured, of ``"insert"``, ``"update"``, ``"delete"`` (default: these) and ``"truncate"``.
    - ``fields``: an UPDATE counts only if it changes one of these fields. Default: every UPDATE counts.
    - ``when``: a ``Q`` of the model's own fields; a row counts if it matches before the change or after it.
    - ``ids``: the field whose values are the ids; default: the primary key. With ``ids="order"`` the task gets the ids
      of the orders whose rows have changed, each once, of the old and of the new order if a row moves.
    - ``batch_size``: ids that one task gets at most.

    On an abstract model it captures the tables of all models that inherit their columns from it. Raises
    ``TaskOptionError`` for a wrong ``on``, ``fields`` or ``batch_size``. A system check finds all other mistakes.
    """

    def __init__(
        self,
        task: PostgresTask | TaskFunction[..., Any] | str,
        *,
        on: str | Iterable[str] = ("insert", "update", "delete"),
        fields: Sequence[str] = (),
        when: models.Q | None = None,
        ids: str | None = None,
        batch_size: int = 1000,
    ) -> None:
        self.on = (on,) if isinstance(on, str) else tuple(on)
        if not self.on or not set(self.on) <= set(OPERATIONS):
            raise TaskOptionError(f"Capture: on is {on!r}; give one or more of {', '.join(OPERATIONS)}.")
        if isinstance(fields, str):
            raise TaskOptionError(f"Capture: fields is {fields!r}; give a list of names.")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise TaskOptionError(f"Capture: batch_size is {batch_size!r}; give 1 or a larger number.")
        self._task, self._fields, self._when, self._ids, self._size = task, fields, when, ids, batch_size

    def contribute_to_class(self, model: type[models.Model], name: str) -> None:
        """Attach the triggers to the model, or to those that inherit it if it is abstract."""
        setattr(model, name, self)

        def attach(sender: Any, **kwargs: Any) -> None:
            if sender is model or (_inherits_from_abstract(sender, model) and getattr(sender, name) is self):
                for trigger in self.triggers(sender, name):
                    trigger.register(sender)

        class_prepared.connect(attach, weak=False)

    def triggers(self, model: type[models.Model], name: str) -> list[CaptureTrigger]:
        """Return the triggers on the table of a model. Their names begin with ``name``."""
        triggers = [CaptureTrigger(self, f"{name}_{operation}", operation) for operation in self.on]
        if "update" in self.on and self._reads_key_only(model):
            triggers.append(ChangedKeyTrigger(self, f"{name}_key", "update"))
        return triggers

    def _reads_key_only(self, model: type[models.Model]) -> bool:
        """Return whether only primary keys are read of an UPDATE. May be called before all models are loaded."""
        key = model._meta.pk
        has_key_as_id = self._ids is None or (key is not None and self._ids in (key.name, key.attname))
        return has_key_as_id and not self._fields and self._when is None

    @property
    def task(self) -> PostgresTask:
        """The task. Raises ``TaskOptionError`` if its path leads to none."""
        task: Any = self._task
        if isinstance(task, str):
            try:
                task = import_string(task)
            except ImportError as error:
                raise TaskOptionError(f"Capture: the task {self._task!r} cannot be imported: {error}.") from error
        if not isinstance(task, PostgresTask):
            raise TaskOptionError(f"Capture: {self._task!r} is not a task; decorate the function with @task.")
        return task

    def tables(self, model: type[models.Model], operation: str) -> tuple[str, ...]:
        """Return the transition tables that the trigger of an operation reads."""
        if operation == "update":
            return ("new_rows",) if self._reads_key_only(model) else ("old_rows", "new_rows")
        return {"insert": ("new_rows",), "delete": ("old_rows",)}.get(operation, ())

    def body(self, model: type[models.Model], operation: str, rows: tuple[str, ...]) -> tuple[str, str]:
        """Return the variables and the statements of a trigger function that reads these rows.

        Raises ``TaskOptionError``.
        """
        try:
            captured = Captured(operation, _concrete(model)._meta.label_lower, self._columns(model), rows)
            declare, statements = body_of(self.task, captured, size=self._size)
        except (FieldDoesNotExist, FieldError, LockKeyError) as error:
            raise TaskOptionError(f"Capture: {error}") from error
        if QUOTES in statements:
            raise TaskOptionError(f"Capture: no option may contain {QUOTES}.")
        return declare, statements

    def _columns(self, model: type[models.Model]) -> Columns:
        key = [identifier(str(field.column)) for field in model._meta.pk_fields]
        if self._ids is None and len(key) > 1:
            raise TaskOptionError("Capture: the primary key has several fields. Name the field of the ids with ids.")
        field = _own_field(model, self._ids or model._meta.pk_fields[0].name)
        target = field
        while isinstance(target, models.ForeignKey):
            target = target.target_field
        return Columns(
            id=identifier(field.column),
            primary_key=tuple(key),
            watched=tuple(identifier(_own_field(model, name).column) for name in self._fields),
            condition="true" if self._when is None else _condition(model, self._when),
            has_plain_id=isinstance(target, PLAIN),
        )


class CaptureTrigger(pgtrigger.Trigger):
    """The trigger of one operation, which runs once for a statement. Made by ``Capture``."""

    level, when = pgtrigger.Statement, pgtrigger.After

    def __init__(self, capture: Capture, name: str, captured: str) -> None:
        self.capture, self.captured = capture, captured
        super().__init__(name=name, operation=OPERATIONS[captured])

    def compile(self, model: Any) -> CompiledCapture:
        """Return what a migration contains. Raises ``TaskOptionError``."""
        declare, statements = self.body(model)
        return CompiledCapture(
            name=self.name,
            sql=CaptureSql(
                pgid=self.get_pgid(model),
                declare=declare,
                func=statements,
                table=model._meta.db_table,
                when=self.when,
                level=self.level,
                **self.event(model),
            ),
        )

    def body(self, model: Any) -> tuple[str, str]:
        """Return the variables and the statements of the function. Raises ``TaskOptionError``."""
        return self.capture.body(model, self.captured, self.capture.tables(model, self.captured))

    def event(self, model: Any) -> dict[str, Any]:
        """Return when the trigger runs and what it can read, as arguments of ``CaptureSql``."""
        tables = {name.removesuffix("_rows"): name for name in self.capture.tables(model, self.captured)}
        referencing: Any = pgtrigger.Referencing
        return {"operation": self.operation, "referencing": referencing(**tables) if tables else ""}


class ChangedKeyTrigger(CaptureTrigger):
    """The trigger for the old primary key of a row, if the trigger of UPDATE reads only new rows.

    It names the column of the key, so that it costs nothing in an UPDATE that does not set it. PostgreSQL allows no
    transition tables then, so it runs once for each row.
    """

    level = pgtrigger.Row

    def body(self, model: Any) -> tuple[str, str]:
        """Return the variables and the statements of the function. Raises ``TaskOptionError``."""
        return self.capture.body(model, self.captured, (OLD_ROW,))

    def event(self, model: Any) -> dict[str, Any]:
        """Return when the trigger runs, as arguments of ``CaptureSql``."""
        return {"operation": f"UPDATE OF {identifier(model._meta.pk.column)}"}


class CompiledCapture(compiler.Trigger):
    """The trigger as a migration contains it. It goes together with its function."""

    @property
    def uninstall_sql(self) -> str:
        """The SQL that drops both.

        By the function, because a migration that renames the model does so before it drops the trigger, which still
        has the old name of the table.
        """
        return f"DROP FUNCTION IF EXISTS {self.sql.pgid}() CASCADE;"


class CaptureSql(compiler.UpsertTriggerSql):
    """The SQL that makes the function and the trigger.

    The function has the rights of its owner, the role of the migration. So a program that has only the right to write
    to the table works as before. For safety, no other role may make a trigger of the function, and it finds names only
    in the schemas in which the migration finds them, before temporary tables. The role of the migration has to trust
    all roles that can create objects in these schemas:
    https://www.postgresql.org/docs/current/sql-createfunction.html#SQL-CREATEFUNCTION-SECURITY.
    """

    def get_template(self) -> str:
        """Return the text, with the names of ``UpsertTriggerSql`` in braces."""
        return """
CREATE OR REPLACE FUNCTION {pgid}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $capture$
#variable_conflict use_column
{declare}
BEGIN
IF TG_NAME = ANY (NULLIF(current_setting('pgtrigger.ignore', true), '')::text[]) THEN
    RETURN NULL;
END IF;
{func}
RETURN NULL;
END;
$capture$;
REVOKE ALL ON FUNCTION {pgid}() FROM PUBLIC;
DO $capture$ BEGIN
EXECUTE format('ALTER FUNCTION {pgid}() SET search_path = pg_catalog, %s, pg_temp', (
    SELECT string_agg(quote_ident(name), ', ') FROM unnest(current_schemas(false)) AS name));
END; $capture$;
DROP TRIGGER IF EXISTS {pgid} ON {table};
CREATE TRIGGER {pgid} {when} {operation} ON {table} {referencing}
FOR EACH {level} EXECUTE FUNCTION {pgid}();
COMMENT ON TRIGGER {pgid} ON {table} IS '{hash}';
"""


def _inherits_from_abstract(model: type[models.Model], base: type[models.Model]) -> bool:
    """Return whether a model inherits its columns from an abstract model. A child of a table has its own table."""
    meta = model._meta
    is_in_parent = any(issubclass(parent, base) for parent in meta.parents)
    return base._meta.abstract and issubclass(model, base) and not meta.proxy and not is_in_parent


def _concrete(model: type[models.Model]) -> type[models.Model]:
    return model._meta.concrete_model or model


def _own_field(model: type[models.Model], name: str) -> Any:
    field: Any = model._meta.get_field(name)
    if field not in _concrete(model)._meta.local_concrete_fields:
        raise TaskOptionError(
            f"Capture: {model._meta.label}.{name} is not a column of the table {model._meta.db_table}."
        )
    if field.generated and not field.db_persist:
        # https://www.postgresql.org/docs/18/ddl-generated-columns.html: they are computed when they are read.
        raise TaskOptionError(f"Capture: {model._meta.label}.{name} is not stored, so no trigger can read it.")
    return field


def _condition(model: type[models.Model], when: models.Q) -> str:
    """Return a condition on the row as SQL, as Django does for a constraint."""
    connection = connections[router.db_for_write(model)]
    for name in when.referenced_base_fields:
        _own_field(model, name)
    query = Query(model, alias_cols=False)
    text, values = query.build_where(when).as_sql(query.get_compiler(connection=connection), connection)
    return str(text % tuple(map(literal, values)))


@register("django_pglock")
def check_captures(**kwargs: Any) -> list[CheckMessage]:
    """E007 to E010: a capture without the app, or that is invalid, or whose tasks no worker would run."""
    triggers: list[tuple[Any, pgtrigger.Trigger]] = pgtrigger.registered()
    captures = dict.fromkeys((model, each.capture) for model, each in triggers if isinstance(each, CaptureTrigger))
    return [problem for model, capture in captures if (problem := _problem(model, capture)) is not None]


def _problem(model: type[models.Model], capture: Capture) -> CheckMessage | None:
    if not apps.is_installed("pgtrigger"):
        return Error(
            "Capture needs triggers, but no migration creates them, because pgtrigger is not installed.",
            hint="Add 'pgtrigger' to INSTALLED_APPS and run: manage.py makemigrations",
            obj=model,
            id="django_pglock.E009",
        )
    if not apps.is_installed("django_pglock"):
        return Error(NOT_INSTALLED, obj=model, id="django_pglock.E007")
    try:
        for trigger in capture.triggers(model, "capture"):
            trigger.body(model)
        task = capture.task
        backend = task.get_backend()
        backend.validate_task(task)
    except (TaskOptionError, InvalidTask) as error:
        return Error(str(error), obj=model, id="django_pglock.E008")
    written, expected = router.db_for_write(model), getattr(backend, "database", None)
    if expected in (None, written):
        return None
    return Error(
        f"The model is written to the database {written!r}, where its triggers enqueue {task.module_path}, but the "
        f"tasks of TASKS[{task.backend!r}] are in {expected!r}.",
        hint="In @task, name a backend that stores its tasks in the database of the model.",
        obj=model,
        id="django_pglock.E010",
    )
