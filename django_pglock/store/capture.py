"""Capturing: the trigger functions that enqueue a task for the rows that a statement has changed.

A trigger runs once for each statement and reads all changed rows from the transition tables ``old_rows`` and
``new_rows``. PostgreSQL writes each changed row into each table that a trigger names. This is most of the cost that a
capture adds to an UPDATE. Usually an UPDATE does not change the primary key. So if the task gets only primary keys, the
trigger of UPDATE names only ``new_rows``. For each row whose key was changed, a second trigger runs, with the old key.

A trigger writes the same rows as ``enqueue()``. The values and keys that ``enqueue()`` computes from the options of the
task are computed here once, and are literals in the text of the function. Only two parts of a key may differ from row
to row: ``{id}`` and ``{schema}``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from django_pglock.errors import TaskOptionError
from django_pglock.keys.template import KeyTemplate
from django_pglock.store.call import due_of, meta_of, seconds_kept
from django_pglock.store.statements import IN_ORDER_OF_KEYS, filled
from django_pglock.store.wake import READY_CHANNEL, SCHEDULED_CHANNEL
from django_pglock.tasks.call_keys import (
    LONGEST_ARGUMENTS,
    LONGEST_KEY,
    CallKeys,
    call_signature,
    keys_of,
    names_in_keys,
    text_of_arguments,
)
from django_pglock.tasks.states import UniqueScope

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields
    from django_pglock.tasks.options import Unique

#: The names of the parameters to which a capture can pass a value. A function may have any of them, but not both
#: ``id`` and ``ids``.
ARGUMENTS = ("id", "ids", "model", "operation", "schema")

# While keys are computed, these characters stand for the values that only the server knows. No text contains them:
# Unicode has them for private use.
_ID, _SCHEMA = "\ue000", "\ue001"

#: The row that the trigger for changed primary keys reads. It runs for each row.
OLD_ROW = "OLD"

# The ids of the changed rows.
CHANGED = "SELECT {id} AS id FROM {rows} WHERE {condition}"

# The same for an UPDATE of the watched columns. Values are compared by their stored bytes, because an operator of their
# type may be in a schema that the function does not search, and the type json has no operator. If the primary key of a
# row was changed, its old row is not found, and the row counts as changed.
CHANGED_COLUMNS = """
SELECT side.id
FROM (SELECT {keys}, {id} AS id, ROW({watched})::record AS watched, {condition} AS matches FROM old_rows) AS old
FULL JOIN (SELECT {keys}, {id} AS id, ROW({watched})::record AS watched, {condition} AS matches FROM new_rows) AS new
    USING ({names})
CROSS JOIN LATERAL (VALUES (old.id, old.matches), (new.id, new.matches)) AS side (id, matches)
WHERE side.matches AND (old.watched OPERATOR(pg_catalog.*<>) new.watched) IS NOT FALSE
"""

# The id that a row had before an UPDATE, if the UPDATE has changed it. This is not a WHEN condition of the trigger,
# because a dump of such a condition cannot be restored.
CHANGED_KEY = """
SELECT OLD.{id} AS id WHERE ROW(OLD.{id})::record OPERATOR(pg_catalog.*<>) ROW(NEW.{id})::record
"""

# One call for each batch of ids, in order. Slices of one array take half the time of window functions and GROUP BY.
IN_PORTIONS = """
SELECT to_jsonb(changed.ids[first:first + {size} - 1]) AS ids
FROM (SELECT ARRAY({ids} ORDER BY id) AS ids) AS changed, generate_series(1, cardinality(changed.ids), {size}) AS first
"""
EACH = "{ids} ORDER BY id"
ONE = "SELECT WHERE EXISTS ({ids})"
ALWAYS = "SELECT '[]'::jsonb AS ids"

INSERT = "INSERT INTO {task} ({columns})\nSELECT {values}\nFROM ({calls}) AS call"

# store/wake.py says why NOTIFY is sent only if a worker sleeps. Here it is sent with the COMMIT, not after it. If a
# worker falls asleep between this statement and a much later COMMIT, its poll finds the task.
WAKE = "PERFORM pg_notify({channel}, {queue}) WHERE EXISTS (SELECT FROM {worker} WHERE is_sleeping);"

ENQUEUE = """
{insert};
IF FOUND THEN
    {wake}
END IF;
"""

# If the unique key of a call is taken, the call is skipped only if the waiting task will see this change. So the row of
# the waiting task is locked to the end of this transaction, because workers skip locked rows. If a worker claims the
# task first, its key is free again, and the call is written.
#
# A task that was enqueued with another value of ``unique`` may keep its key also while it runs. It may have read the
# changed row already. So the call is written nevertheless, without a unique key. This may be one task too many, but no
# change is missed.
#
# The order of the keys is that of ``enqueue_many``, so that two transactions cannot deadlock.
ENQUEUE_UNIQUE = """
wanted := ARRAY(SELECT DISTINCT {unique_key} FROM ({calls}) AS call ORDER BY 1);
IF cardinality(wanted) = 0 THEN
    RETURN NULL;
END IF;
LOOP
    {insert}
    WHERE {unique_key} = ANY (wanted)
    ORDER BY length({unique_key}), ({unique_key}) COLLATE "C"
    ON CONFLICT DO NOTHING;
    PERFORM FROM {task}
    WHERE unique_key = ANY (wanted) AND unique_scope = 'WAITING' AND attempts = 0 AND finished_at IS NULL
    ORDER BY {in_order_of_keys} FOR SHARE;
    GET DIAGNOSTICS locked = ROW_COUNT;
    EXIT WHEN locked = cardinality(wanted);
    taken := ARRAY(SELECT unique_key FROM {task} WHERE unique_key = ANY (wanted)
                   AND (unique_scope = 'UNFINISHED' AND finished_at IS NULL OR unique_scope = 'PERIOD'));
    {insert_without_key}
    WHERE {unique_key} = ANY (taken);
    wanted := ARRAY(SELECT key FROM unnest(wanted) AS key WHERE key <> ALL (taken));
END LOOP;
{wake}
"""
UNIQUE_VARIABLES = "DECLARE wanted text[]; taken text[]; locked bigint;"


class Columns(NamedTuple):
    """The columns of a changed row that a trigger reads, as quoted names, and a condition as SQL.

    ``id`` is the column whose values the task gets. An UPDATE is captured only if it changes one of the columns
    ``watched``; without ``watched`` each UPDATE is. ``has_plain_id``: values of ``id`` are numbers or UUIDs, whose text
    may be part of a key.
    """

    id: str
    primary_key: tuple[str, ...]
    watched: tuple[str, ...] = ()
    condition: str = "true"
    has_plain_id: bool = True


class Captured(NamedTuple):
    """A captured change: its operation, the label of its model, and the columns and the tables that are read.

    ``rows`` are names of transition tables, or ``OLD_ROW`` alone.
    """

    operation: str
    model: str
    columns: Columns
    rows: tuple[str, ...]


def body_of(task: TaskFields, captured: Captured, *, size: int) -> tuple[str, str]:
    """Return the variables and the statements of the trigger function, in PL/pgSQL.

    A call gets at most ``size`` ids. Raises ``TaskOptionError`` for options that a trigger cannot apply, and
    ``LockKeyError`` if the template of a key needs a value that a captured call does not have.
    """
    names = arguments_of(task)
    _refuse(task, names, captured)
    if captured.rows == (OLD_ROW,) and names.isdisjoint({"id", "ids"}):
        return "", ""  # the call for the whole statement is enough
    task_table, worker_table = filled("{task}"), filled("{worker}")
    columns = _columns(task, names, captured)
    calls = _calls(names, captured, size)
    insert = _insert(columns, calls)
    channel = SCHEDULED_CHANNEL if "status" in columns else READY_CHANNEL
    wake = WAKE.format(channel=literal(channel), queue=literal(task.queue_name), worker=worker_table)
    if task.unique is None:
        return "", ENQUEUE.format(insert=insert, wake=wake)
    key = columns["unique_key"]
    others = {name: value for name, value in columns.items() if name not in ("unique_key", "unique_scope")}
    return UNIQUE_VARIABLES, ENQUEUE_UNIQUE.format(
        insert=insert,
        insert_without_key=_insert(others, calls),
        wake=wake,
        calls=calls,
        unique_key=key,
        in_order_of_keys=IN_ORDER_OF_KEYS,
        task=task_table,
    )


def _insert(columns: dict[str, str], calls: str) -> str:
    names, values = ", ".join(columns), ", ".join(columns.values())
    return INSERT.format(task=filled("{task}"), columns=names, values=values, calls=calls)


def arguments_of(task: TaskFields) -> set[str]:
    """Return the names of the arguments that a captured call passes: those that the function has parameters for.

    A grouped function gets all of them, with ``id`` instead of ``ids`` if one of its keys contains ``{id}``. Raises
    ``TaskOptionError`` for a function that cannot be called with them.
    """
    if task.group is not None:
        return set(ARGUMENTS) - ({"ids"} if "id" in names_in_keys(task) else {"id"})
    parameters = call_signature(task.func, task.takes_context).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    names = {each.name for each in named} & set(ARGUMENTS)
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        names |= set(ARGUMENTS) - ({"ids"} if "id" in names else {"id"})
    needed = [each.name for each in named if each.default is each.empty and each.name not in ARGUMENTS]
    if needed or {"id", "ids"} <= names or any(each.kind is each.POSITIONAL_ONLY for each in parameters):
        raise TaskOptionError(
            f"{task.module_path} cannot be called by a capture. A capture passes those of {', '.join(ARGUMENTS)} "
            "that are parameters of the function, by name, and either id or ids. Other parameters need a default."
        )
    return names


def literal(value: str | int) -> str:
    """Return a value as a literal of SQL. Needs no connection."""
    return sql.Literal(value).as_string(None)


def identifier(name: str) -> str:
    """Return the quoted name of a column."""
    return sql.Identifier(name).as_string(None)


def _refuse(task: TaskFields, names: set[str], captured: Captured) -> None:
    """Raise ``TaskOptionError`` for options that a trigger cannot apply."""
    problem = None
    if task.after or due_of(task)[0] is not None:
        problem = "has after, or a date as run_after; both are options of a single call"
    elif captured.operation == "truncate" and ("id" in names or "operation" not in names):
        problem = "cannot get an id from TRUNCATE; give it the parameters operation and ids, and remove id"
    elif "id" in names & names_in_keys(task) and not captured.columns.has_plain_id:
        problem = "has {id} in a key, and the primary key is neither a number nor a UUID"
    elif task.unique is not None:
        problem = _problem_of_unique(task, task.unique, names)
    if problem:
        raise TaskOptionError(f"{task.module_path} cannot be captured for {captured.model}: it {problem}.")


def _problem_of_unique(task: TaskFields, unique: Unique, names: set[str]) -> str | None:
    """Return why changes could be missed if a call is skipped as a duplicate, None if they cannot."""
    if unique.scope != UniqueScope.WAITING or unique.on_conflict != "skip":
        return "must be unique only while it waits, with on_conflict='skip', or changes are lost or writes fail"
    if unique.key is None and task.redact:
        # No reader may find a hidden value by computing the digests of all values, and a trigger has no SECRET_KEY.
        return "has redact and unique=True, whose key a trigger cannot make. Name the key, as in Unique(key='{id}')"
    if "ids" in names:
        return "is unique and has the parameter ids; the ids of a skipped call would be lost. Use the parameter id"
    missing = names - KeyTemplate(unique.key, known=None, where="", is_own=True).names if unique.key else set()
    if missing:
        return f"has a unique key without {', '.join(sorted(missing))}, so a call with another value would be skipped"
    return None


def _columns(task: TaskFields, names: set[str], captured: Captured) -> dict[str, str]:
    """Return the columns of the row that differ from their defaults, each with its value as SQL."""
    keys = _keys(task, names, captured)
    delay = due_of(task)[1]
    values: dict[str, str | int | None] = {
        "queue": task.queue_name,
        "priority": task.priority,
        "task_path": task.module_path,
        "backend": task.backend,
        "max_retries": task.max_attempts - 1,
        "meta": meta_of(task),
        "concurrency": task.concurrency,
        "keep_result": seconds_kept(task),
        "unique_scope": None if task.unique is None else task.unique.scope.value,
    }
    columns = {name: literal(value) for name, value in values.items() if value is not None}
    if delay is not None or keys.lock is not None:
        # A task with a lock key must be admitted after the commit. Here the worker that promotes the task does so.
        seconds = literal(0 if delay is None else str(delay.total_seconds()))
        columns["status"] = literal("SCHEDULED")
        columns["run_after"] = f"statement_timestamp() + make_interval(secs => {seconds})"
    values_of = {"id": "call.id", "ids": "call.ids", "schema": "TG_TABLE_SCHEMA"}
    values_of |= {"model": literal(captured.model), "operation": literal(captured.operation)}
    pairs = [f"{literal(name)}, {values_of[name]}" for name in sorted(names)]
    columns["kwargs"] = f"jsonb_build_object({', '.join(pairs)})"
    texts = {"lock_key": keys.lock, "group_key": keys.group, "fair_key": keys.fair, "unique_key": keys.unique}
    return columns | {name: text for name, text in texts.items() if text is not None}


def _keys(task: TaskFields, names: set[str], captured: Captured) -> CallKeys:
    """Return the keys as expressions of SQL."""
    values = {"id": _ID, "ids": [], "schema": _SCHEMA, "model": captured.model, "operation": captured.operation}
    kwargs = {name: values[name] for name in names}
    keys = keys_of(task, (), kwargs)
    if any(key is not None and len(key) > LONGEST_KEY - 200 for key in keys):
        raise TaskOptionError(f"{task.module_path} cannot be captured: one of its keys may become too long.")
    lock, group, fair, unique = (None if key is None else _expression(key, _TEXTS) for key in keys)
    if task.unique is not None and task.unique.key is None:
        text = _expression(text_of_arguments(task, kwargs), _JSON)
        unique = f"{literal(f'{task.module_path} ')} || {_of_arguments(text)}"
    return CallKeys(lock, group, fair, unique)


def _of_arguments(text: str) -> str:
    """Return the part of the key for ``unique=True``, by the rule of ``tasks/call_keys.py``."""
    digest = f"encode(sha256(convert_to({text}, 'UTF8')), 'hex')"
    return f"CASE WHEN length({text}) > {LONGEST_ARGUMENTS} THEN {digest} ELSE {text} END"


#: The SQL that replaces each mark in a key, with the escapes of ``part_of``; and in JSON, where it replaces the quotes
#: around the mark, too.
_TEXTS = {_ID: "call.id::text", _SCHEMA: "replace(replace(TG_TABLE_SCHEMA, '%', '%25'), ':', '%3A')"}
_JSON = {f'"{_ID}"': "to_jsonb(call.id)::text", f'"{_SCHEMA}"': "to_jsonb(TG_TABLE_SCHEMA)::text"}


def _expression(text: str, values: dict[str, str]) -> str:
    """Return a text as SQL: its literal pieces, joined with the values of its marks."""
    pieces = re.split(f"({'|'.join(values)})", text)
    return " || ".join(values.get(piece) or literal(piece) for piece in pieces if piece)


def _calls(names: set[str], captured: Captured, size: int) -> str:
    """Return the query of the calls of one statement: one call for each batch of ids, one for each id, or one."""
    if captured.operation == "truncate":
        return ALWAYS
    if "ids" in names:
        return IN_PORTIONS.format(ids=_changed_ids(captured), size=size)
    return (EACH if "id" in names else ONE).format(ids=_changed_ids(captured))


def _changed_ids(captured: Captured) -> str:
    columns, operation = captured.columns, captured.operation
    if captured.rows == (OLD_ROW,):
        changed = CHANGED_KEY.format(id=columns.id)
    elif columns.watched and operation == "update":
        # The id of a row is watched, too: a change of the id also changes the object that the row had belonged to.
        watched = ", ".join(dict.fromkeys((columns.id, *columns.watched)))
        keys = {f"key{number}": column for number, column in enumerate(columns.primary_key)}
        changed = CHANGED_COLUMNS.format(
            keys=", ".join(f"{column} AS {name}" for name, column in keys.items()),
            names=", ".join(keys),
            id=columns.id,
            watched=watched,
            condition=columns.condition,
        )
    else:
        changed = " UNION ALL ".join(
            CHANGED.format(id=columns.id, rows=rows, condition=columns.condition) for rows in captured.rows
        )
    is_distinct = len(captured.rows) == 1 and (columns.id,) == columns.primary_key
    return changed if is_distinct else f"SELECT DISTINCT id FROM ({changed}) AS changed WHERE id IS NOT NULL"
