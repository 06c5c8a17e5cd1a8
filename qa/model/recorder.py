"""Records what happens to rows while real workers work, as the events of the models.

A trigger writes each version of a row, in the order in which the server has made them. What a transaction does after
another one has committed always comes after it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from django.db import connection

from qa.model.checker import FOLDER, Model

START = """
CREATE TABLE model_history (
    number bigint GENERATED ALWAYS AS IDENTITY, task bigint, key text, was text, status text, attempt int, worker uuid,
    is_uncounted boolean);
CREATE FUNCTION model_note_task() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO model_history (task, key, was, status) VALUES (NEW.id, NEW.lock_key, '', NEW.status);
    ELSIF NEW.status <> OLD.status THEN
        INSERT INTO model_history (task, key, was, status, attempt, worker, is_uncounted)
        VALUES (NEW.id, NEW.lock_key, OLD.status, NEW.status, NEW.attempts, COALESCE(NEW.worker, OLD.worker),
                NEW.uncounted > OLD.uncounted);
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION model_note_run() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO model_history (task, was, status, attempt, worker)
    VALUES (NEW.task, 'run', CASE TG_OP WHEN 'INSERT' THEN 'BEGIN' ELSE 'END' END, NEW.attempt, NEW.worker);
    RETURN NULL;
END $$;
CREATE TABLE model_lease_history (number bigint GENERATED ALWAYS AS IDENTITY, kind text, who int, token int);
CREATE FUNCTION model_note_lease() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'UPDATE' AND NEW.token <> OLD.token AND OLD.released_at IS NULL THEN
        INSERT INTO model_lease_history (kind, who, token)
        SELECT 'EXPIRED', OLD.owner::int, OLD.token WHERE OLD.expires_at <= clock_timestamp();
    END IF;
    INSERT INTO model_lease_history (kind, who, token)
    VALUES (CASE WHEN TG_OP = 'INSERT' OR NEW.token <> OLD.token THEN 'TAKE'
                 WHEN NEW.released_at IS NOT NULL THEN 'RELEASED' ELSE 'RENEWED' END, NEW.owner::int, NEW.token);
    RETURN NULL;
END $$;
CREATE FUNCTION model_note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO model_lease_history (kind, who, token) VALUES ('WROTE', NEW.pid, NEW.number);
    RETURN NULL;
END $$;
CREATE TRIGGER model_note AFTER INSERT OR UPDATE ON django_pglock_lease
FOR EACH ROW EXECUTE FUNCTION model_note_lease();
CREATE TRIGGER model_note AFTER UPDATE ON sample_effect FOR EACH ROW EXECUTE FUNCTION model_note_write();
CREATE TRIGGER model_note AFTER INSERT OR UPDATE ON django_pglock_task FOR EACH ROW EXECUTE FUNCTION model_note_task();
CREATE TRIGGER model_note AFTER INSERT OR UPDATE ON sample_run FOR EACH ROW EXECUTE FUNCTION model_note_run();
"""
STOP = """
DROP TRIGGER model_note ON django_pglock_task;
DROP TRIGGER model_note ON sample_run;
DROP TRIGGER model_note ON django_pglock_lease;
DROP TRIGGER model_note ON sample_effect;
DROP FUNCTION model_note_task, model_note_run, model_note_lease, model_note_write;
DROP TABLE model_history, model_lease_history;
"""
READ = "SELECT task, key, was, status, attempt, worker::text, is_uncounted FROM model_history ORDER BY number"
READ_LEASES = "SELECT kind, who, token FROM model_lease_history ORDER BY number"

#: The events of fence.pml, by the statuses before and after; an end of the claim may be one of two.
CLAIMS = {
    ("READY", "RUNNING"): "CLAIM",
    ("RUNNING", "SUCCESSFUL"): "FINISH",
    ("RUNNING", "FAILED"): "FINISH",
    ("RUNNING", "SCHEDULED"): "AGAIN",
    ("RUNNING", "READY"): "RESCUE",
    ("RUNNING", "BLOCKED"): "RESCUE",
    ("run", "BEGIN"): "BEGIN",
    ("run", "END"): "END",
}
#: The events of keys.pml.
KEYS = {
    ("", "BLOCKED"): "ENQUEUE",
    ("", "READY"): "ENQUEUE_READY",
    ("BLOCKED", "READY"): "ADMIT",
    ("READY", "RUNNING"): "CLAIM",
    ("RUNNING", "SUCCESSFUL"): "FINISH",
    ("RUNNING", "FAILED"): "FINISH",
    ("RUNNING", "SCHEDULED"): "AGAIN",
    ("RUNNING", "BLOCKED"): "RESCUE",
    ("SCHEDULED", "BLOCKED"): "PROMOTE",
}


class Event(NamedTuple):
    """An event of a model: its name, which worker or task it is about, and the number of the attempt."""

    kind: str
    who: int
    number: int = 0


History = tuple[Event, ...]


class Version(NamedTuple):
    """A version of a row of a task, or the begin or the end of a run of its function."""

    task: int
    key: str | None
    was: str
    status: str
    attempt: int | None
    worker: str | None
    is_uncounted: bool | None


@contextmanager
def recording() -> Iterator[None]:
    """Record all versions of rows from here on."""
    with connection.cursor() as cursor:
        cursor.execute(START)
        try:
            yield
        finally:
            cursor.execute(STOP)


def versions() -> list[Version]:
    """Return what was recorded."""
    with connection.cursor() as cursor:
        cursor.execute(READ)
        return [Version(*row) for row in cursor.fetchall()]


def lease_history() -> History:
    """Return what was recorded of the lease, for leases.pml. The owner of a lease is the number of its process."""
    with connection.cursor() as cursor:
        cursor.execute(READ_LEASES)
        return tuple(Event(*row) for row in cursor.fetchall())


def claims_of(rows: Iterable[Version]) -> set[History]:
    """Return the history of each task for fence.pml; tasks with the same history once."""
    by_task: dict[int, list[Version]] = defaultdict(list)
    for row in rows:
        if "RUNNING" in (row.was, row.status) or row.was == "run":
            by_task[row.task].append(row)
    return {_claims_of_one(each) for each in by_task.values()}


def _claims_of_one(rows: list[Version]) -> History:
    workers: dict[str | None, int] = {}
    history = []
    for row in rows:
        kind = "GIVE_BACK" if row.is_uncounted else CLAIMS[row.was, row.status]
        history.append(Event(kind, workers.setdefault(row.worker, len(workers)), row.attempt or 0))
    return tuple(history)


def keys_of(rows: Iterable[Version]) -> set[History]:
    """Return the history of each lock key for keys.pml."""
    by_key: dict[str, list[Version]] = defaultdict(list)
    for row in rows:
        if row.key is not None and row.was != "run":
            by_key[row.key].append(row)
    return {_key_of_one(each) for each in by_key.values()}


def _key_of_one(rows: list[Version]) -> History:
    places = {task: place for place, task in enumerate(sorted({row.task for row in rows}))}
    return tuple(Event(KEYS[row.was, row.status], places[row.task]) for row in rows)


def accepted(model: str, histories: Sequence[History], *sizes: str) -> list[bool]:
    """Say of each history whether it is a run of the model, with these sizes ("-DNAME=NUMBER")."""
    found = Model(model).accepted(promela(model, histories), *sizes)
    return [number in found for number in range(len(histories))]


def promela(model: str, histories: Iterable[History]) -> str:
    """Return the text of ``histories.pml``, which common.pml includes."""
    numbers = dict(re.findall(r"^#define (\w+) (\d+)$", (FOLDER / f"{model}.pml").read_text(), re.MULTILINE))
    first, events = [0], []
    for history in histories:
        events += [(numbers[event.kind], event.who, event.number) for event in history]
        first.append(len(events))
    columns = zip(("kinds", "whose", "numbers"), zip(*events, strict=True), strict=True)
    return "\n".join(
        [
            f"#define HISTORIES {len(first) - 1}",
            _array("short", "first", first),
            *(_array("byte", name, values) for name, values in columns),
        ]
    )


def _array(kind: str, name: str, values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    return f"hidden {kind} {name}[{len(texts)}] = {{ {', '.join(texts)} }};"
