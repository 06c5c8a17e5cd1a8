"""Capture every change of a table as tasks, by triggers.

A ``Capture`` stands among the constraints of a model. So ``makemigrations`` writes it into the migrations of the app,
and a renamed table keeps its triggers::

    class Product(models.Model):
        name = models.CharField(max_length=100)

        class Meta:
            constraints = [Capture("shop.tasks.reindex", name="product_capture", fields=["name"])]

    @task
    def reindex(ids):  # in shop/tasks.py
        ...

A trigger does one thing, in the transaction of the change: it inserts a row for the task ``captured``, with the ids of
the changed rows. A worker runs ``captured``, which enqueues the declared function. So keys, groups, uniqueness and all
other options of the function are applied by Python, and changing them needs no migration.

Changes keep their order. A transaction that changes a row waits for the one that has changed it before, so its trigger
runs later, and its task has a later date and a larger id. All tasks of one capture have one lock key, so they run one
after the other, up to a hundred in one call. A call enqueues in the transaction that ends it, so it does so exactly
once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, register
from django.core.exceptions import FieldDoesNotExist
from django.db import connections, models, router
from django.db.backends.ddl_references import Statement, Table
from django.db.models.constraints import BaseConstraint
from django.utils.module_loading import import_string

from django_pglock import Group, enqueue_many, task
from django_pglock.errors import ConfigurationError, PGLockError, TaskOptionError
from django_pglock.store.statements import filled
from django_pglock.store.wake import SCHEDULED_CHANNEL
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.call_keys import call_signature, names_in_keys
from django_pglock.tasks.compat import InvalidTask
from django_pglock.tasks.definition import PostgresTask
from django_pglock.tasks.states import UniqueScope

#: Attempts of the task that a trigger inserts.
MOST_ATTEMPTS = 20
#: The operations that can be captured, each with the transition tables that its trigger reads.
OPERATIONS = {
    "insert": {"new_rows": "NEW"},
    "update": {"old_rows": "OLD", "new_rows": "NEW"},
    "delete": {"old_rows": "OLD"},
}
#: The parameters of a function to which a capture passes values. A function has either ``id`` or ``ids``.
ARGUMENTS = {"id", "ids", "model", "operation", "schema"}

# The ids of the changed rows. If an UPDATE leaves the watched columns of a row as they were, both tables have the row
# with the same text. The text also compares values whose type has no operator "=", such as json.
CHANGED = "SELECT id FROM ({rows}) AS changed WHERE id IS NOT NULL GROUP BY id ORDER BY id"
WATCHED = CHANGED.replace("{rows}", "SELECT id FROM ({rows}) AS changed GROUP BY id, state HAVING count(*) = 1")

# The function has the rights of its owner, the role that migrates. So a program that may only write to the table works
# as before. No other role may make a trigger of the function, and it finds names only in the schemas in which the
# migration finds them, and in those before temporary tables.
#
# A task with a lock key is admitted after the commit. Here the worker that promotes the task does so, and NOTIFY wakes
# it. The date is the time of the trigger, not of its statement, which may have waited for an earlier change.
TRIGGER = f"""
CREATE OR REPLACE FUNCTION %(function)s() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $capture$
BEGIN
    INSERT INTO {{task}} (status, run_after, queue, backend, task_path, max_retries, lock_key, group_key, kwargs)
    SELECT 'SCHEDULED', clock_timestamp(), 'default', %(values)s, jsonb_build_object('name', %(name)s,
        'schema', TG_TABLE_SCHEMA, 'table', TG_TABLE_NAME, 'operation', lower(TG_OP),
        'ids', to_jsonb(changed.ids[first:first + 999]))
    FROM (SELECT ARRAY(%(ids)s) AS ids) AS changed, generate_series(1, cardinality(changed.ids), 1000) AS first;
    PERFORM pg_notify('{SCHEDULED_CHANNEL}', 'default')
    WHERE FOUND AND EXISTS (SELECT FROM {{worker}} WHERE is_sleeping);
    RETURN NULL;
END $capture$;
REVOKE ALL ON FUNCTION %(function)s() FROM PUBLIC;
DO $capture$ BEGIN
EXECUTE format('ALTER FUNCTION %(function)s() SET search_path = pg_catalog, %%s, pg_temp', (
    SELECT string_agg(quote_ident(name), ', ') FROM unnest(current_schemas(false)) AS name));
END $capture$;
CREATE TRIGGER %(function)s AFTER %(operation)s ON %(table)s REFERENCING %(tables)s
FOR EACH STATEMENT EXECUTE FUNCTION %(function)s();
"""


class Capture(BaseConstraint):
    """Among the ``constraints`` of a model, it makes a task of each change of the table, in the change's transaction.

    - ``task``: a task function, with ``using()`` if need be, or the path of one, such as ``"shop.tasks.reindex"``. The
      function has any of these parameters: ``ids``, a list of ids of changed rows, or ``id``, one of them;
      ``operation``, which is ``"insert"``, ``"update"`` or ``"delete"``; ``model``, such as ``"shop.product"``; and
      ``schema``, the schema of the table.
    - ``name``: the name of the triggers. It stays when the model is renamed.
    - ``on``: what is captured. ``fields``: an UPDATE counts only if it changes one of these fields.
    - ``ids``: the field whose values are the ids; default: the primary key. With ``ids="order"`` the function gets the
      ids of the orders whose rows have changed, of the old and of the new order if a row moves.
    """

    def __init__(
        self,
        task: Any = "",
        *,
        name: str,
        on: str | Iterable[str] = tuple(OPERATIONS),
        fields: Sequence[str] = (),
        ids: str | None = None,
    ) -> None:
        self.on = (on,) if isinstance(on, str) else tuple(on)
        if not self.on or not set(self.on) <= set(OPERATIONS):
            raise TaskOptionError(f"Capture: on is {on!r}; give one or more of {', '.join(OPERATIONS)}.")
        self._task, self.fields, self.ids = task, tuple(fields), ids
        super().__init__(name=name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Capture) and self.deconstruct() == other.deconstruct()

    __hash__ = BaseConstraint.__hash__
    # By itself Django would make it again from a migration's text, which has no task.
    clone = copy

    def deconstruct(self) -> Any:
        """Return what a migration contains: not the task, on which the triggers do not depend."""
        _, args, kwargs = super().deconstruct()
        return f"{__name__}.Capture", args, {**kwargs, "on": self.on, "fields": self.fields, "ids": self.ids}

    @property
    def task(self) -> PostgresTask:
        """The task. Raises ``ImportError`` and ``TaskOptionError`` if its path leads to none."""
        found: Any = import_string(self._task) if isinstance(self._task, str) else self._task
        if not isinstance(found, PostgresTask):
            raise TaskOptionError(f"Capture: {self._task!r} is not a task; decorate the function with @task.")
        return found

    def calls(self, model: type[models.Model], *, ids: list[Any], **values: Any) -> list[dict[str, Any]]:
        """Return the arguments of each call of the function for a row that a trigger has inserted."""
        task, values["model"] = self.task, (model._meta.concrete_model or model)._meta.label_lower
        parameters = call_signature(task.func, task.takes_context).parameters.values()
        names = {each.name for each in parameters} & ARGUMENTS
        has_id = "id" in (names | names_in_keys(task) if task.group else names)
        if task.group or any(each.kind is each.VAR_KEYWORD for each in parameters):
            names = ARGUMENTS
        own = {name: value for name, value in values.items() if name in names}
        if has_id:
            return [{**own, "id": each} for each in ids]
        return [{**own, "ids": ids} if "ids" in names else own]

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """Make the triggers of a new table, after the table."""
        schema_editor.deferred_sql.extend(self.statements(model, schema_editor))

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statements that make the triggers of a table."""
        return "".join(map(str, self.statements(model, schema_editor)))

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Return the statements that drop the functions and, with them, the triggers."""
        return "".join(f"DROP FUNCTION IF EXISTS {self.name}_{each}() CASCADE;\n" for each in self.on)

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Refuse no row."""

    def statements(self, model: Any, schema_editor: Any) -> list[Statement]:
        """Return the function and the trigger of each operation. Raises ``TaskOptionError``, ``FieldDoesNotExist``."""
        if not re.fullmatch("[a-z_][a-z0-9_]{0,55}", self.name):
            raise TaskOptionError(f"Capture: name is {self.name!r}; give 1 to 56 of a to z, 0 to 9 and _.")
        key, quoted = f"captured:{self.name}", schema_editor.quote_value
        here = (each.alias for each in our_backends(schema_editor.connection.alias))
        values = (next(here, "default"), captured.module_path, MOST_ATTEMPTS - 1, key, key)
        parts = {
            "name": quoted(self.name),
            "values": ", ".join(map(quoted, values)),
            "table": Table(model._meta.db_table, schema_editor.quote_name),
        }
        columns = self._columns(model)
        if columns[0] is None:
            raise TaskOptionError("Capture: the primary key has several fields. Name the field of the ids with ids.")
        id_, *watched = map(schema_editor.quote_name, columns)
        state = f", ROW({', '.join([id_, *watched])})::text AS state" if self.fields else ""
        changed, select = WATCHED if self.fields else CHANGED, f"SELECT {id_} AS id{state} FROM "
        return [
            Statement(
                filled(TRIGGER),
                **parts,
                function=f"{self.name}_{each}",
                operation=each.upper(),
                tables=" ".join(f"{kind} TABLE AS {table}" for table, kind in OPERATIONS[each].items()),
                ids=changed.format(rows=" UNION ALL ".join(select + table for table in OPERATIONS[each])),
            )
            for each in self.on
        ]

    def _columns(self, model: Any) -> list[Any]:
        """Return the column of the ids, those of the primary key, and those that are watched."""
        meta = model._meta
        named = [meta.get_field(name) for name in ((self.ids,) if self.ids else ()) + self.fields]
        for field in named:
            if field not in (meta.concrete_model or model)._meta.local_concrete_fields:
                raise TaskOptionError(f"Capture: {field.name} is not a column of the table {meta.db_table}.")
        ids = named.pop(0) if self.ids else meta.pk
        return [field.column for field in (ids, *meta.pk_fields, *named)]


@task(lock="captured:{name}", group=Group("captured:{name}", limit=100), atomic=True, max_attempts=MOST_ATTEMPTS)
def captured(calls: list[dict[str, Any]]) -> None:
    """Enqueue the declared functions for the rows that triggers have inserted, in their order."""
    known = {capture.name: (model, capture) for model, capture in declared()}
    for call in calls:
        if call["name"] not in known:
            raise LookupError(
                f"The code of this worker declares no Capture {call['name']!r}, but the table {call['table']!r} has "
                "its triggers. Deploy the code that declares it, or migrate the table and discard this task."
            )
        model, capture = known[call["name"]]
        values = {name: call[name] for name in ("ids", "operation", "schema")}
        enqueue_many(capture.task, capture.calls(model, **values))


def declared() -> Iterator[tuple[type[models.Model], Capture]]:
    """Yield each capture with its model."""
    for model in apps.get_models():
        yield from ((model, each) for each in model._meta.constraints if isinstance(each, Capture))


@register("django_pglock")
def check_captures(**kwargs: Any) -> list[CheckMessage]:
    """E008: a capture that is invalid, or whose tasks no worker would run."""
    problems: list[CheckMessage] = []
    for model, capture in declared():
        try:
            _require_valid(model, capture)
        except ConfigurationError:  # noqa: PERF203 - there are few; E001 reports wrong settings
            continue
        except (FieldDoesNotExist, ImportError, InvalidTask, PGLockError) as error:
            text = f"The capture {capture.name!r} cannot work: {error}"
            problems.append(Error(text, obj=model, id="django_pglock.E008"))
    return problems


def _require_valid(model: type[models.Model], capture: Capture) -> None:
    """Raise the error that a migration or a worker would raise."""
    function, database = capture.task, router.db_for_write(model)
    if not our_backends(database):
        raise TaskOptionError(f"no backend of TASKS stores its tasks in {database!r}, the database of the model.")
    capture.statements(model, connections[database].schema_editor())
    [call] = capture.calls(model, ids=[1], operation=capture.on[0], schema="public")
    backend: Any = function.get_backend()
    backend.check_call(function, [], call)
    unique = function.unique
    if unique is not None and (unique.scope != UniqueScope.WAITING or unique.on_conflict == "raise"):
        raise TaskOptionError(
            f"{function.module_path} has to be unique only while it waits, without on_conflict='raise'. Otherwise "
            "changes are lost."
        )
