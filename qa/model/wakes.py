"""Records how real workers fall asleep and are woken, as the events of wake.pml.

Triggers record what workers do to their rows and to tasks, and that a task will be committed. Processes that enqueue
record whether somebody was asleep, after they have asked (``producer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection

from qa.model.recorder import Event, History

START = """
CREATE TABLE model_wakes (
    number bigint GENERATED ALWAYS AS IDENTITY, kind text NOT NULL, producer int, worker uuid);
CREATE FUNCTION model_note_inserted() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO model_wakes (kind, producer) VALUES ('INSERTED', (NEW.args->>0)::int);
    RETURN NULL;
END $$;
CREATE FUNCTION model_note_claimed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO model_wakes (kind, worker) VALUES ('CLAIMED', NEW.worker);
    RETURN NULL;
END $$;
CREATE FUNCTION model_note_worker() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF TG_OP = 'UPDATE' THEN
        INSERT INTO model_wakes (kind, worker) VALUES (CASE WHEN NEW.is_sleeping THEN 'ASKED' ELSE 'AWAKE' END, NEW.id);
    ELSE
        INSERT INTO model_wakes (kind, worker)
        VALUES (CASE TG_OP WHEN 'INSERT' THEN 'REGISTERED' ELSE 'REMOVED' END, COALESCE(NEW.id, OLD.id));
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER model_inserted AFTER INSERT ON django_pglock_task DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.status = 'READY') EXECUTE FUNCTION model_note_inserted();
CREATE TRIGGER model_claimed AFTER UPDATE ON django_pglock_task
FOR EACH ROW WHEN (OLD.status = 'READY' AND NEW.status = 'RUNNING') EXECUTE FUNCTION model_note_claimed();
CREATE TRIGGER model_worker AFTER INSERT OR DELETE ON django_pglock_worker
FOR EACH ROW EXECUTE FUNCTION model_note_worker();
CREATE TRIGGER model_sleep AFTER UPDATE ON django_pglock_worker
FOR EACH ROW WHEN (OLD.is_sleeping <> NEW.is_sleeping) EXECUTE FUNCTION model_note_worker();
"""
STOP = """
DROP TRIGGER model_inserted ON django_pglock_task;
DROP TRIGGER model_claimed ON django_pglock_task;
DROP TRIGGER model_worker ON django_pglock_worker;
DROP TRIGGER model_sleep ON django_pglock_worker;
DROP FUNCTION model_note_inserted, model_note_claimed, model_note_worker;
DROP TABLE model_wakes;
"""
READ = "SELECT kind, producer, worker::text FROM model_wakes ORDER BY number"
#: What a producer records: the kind of the event, and its number.
TELL = "INSERT INTO model_wakes (kind, producer) VALUES (%s, %s)"


@contextmanager
def recording_wakes() -> Iterator[None]:
    """Record from here on. No worker may run yet, and none any more at the end."""
    with connection.cursor() as cursor:
        cursor.execute(START)
        try:
            yield
        finally:
            cursor.execute(STOP)


def wake_history() -> History:
    """Return what was recorded. In the model each worker has begun before, so its first row is left out."""
    with connection.cursor() as cursor:
        cursor.execute(READ)
        rows = cursor.fetchall()
    workers: dict[str, int] = {}
    history = []
    for kind, producer, worker in rows:
        if worker is None:
            history.append(Event(kind, producer))
        elif worker in workers or kind != "REGISTERED":
            history.append(Event(kind, workers[worker]))
        else:
            workers[worker] = len(workers)
    return tuple(history)
