"""Row-level security: policies of the server that go by a setting of the session, such as ``app.user``.

The setting belongs to Django's own session. The server refuses an enqueue from a session without the setting.
"""

from __future__ import annotations

import pytest
from django.db import ProgrammingError, connections, transaction
from django.db.utils import DatabaseError

from django_pglock import enqueue_many, lock, task
from django_pglock.models import AdvisoryLock
from qa.foreign.row_security import acting_as
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing


@task
def write_for(user: str, text: str) -> None:
    with acting_as(user):
        Letter.objects.create(text=text)


RULES = """
GRANT ALL ON ALL TABLES IN SCHEMA public TO shop;
GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO shop;
ALTER TABLE sample_letter ADD COLUMN owner text NOT NULL DEFAULT current_setting('app.user', true);
ALTER TABLE sample_letter ENABLE ROW LEVEL SECURITY;
CREATE POLICY own ON sample_letter USING (owner = current_setting('app.user', true));
CREATE TABLE called (task bigint, by text);
GRANT ALL ON called TO shop;
CREATE FUNCTION note_call() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF coalesce(current_setting('app.user', true), '') = '' THEN
        RAISE EXCEPTION 'nobody calls' USING ERRCODE = 'insufficient_privilege';
    END IF;
    INSERT INTO called VALUES (NEW.id, current_setting('app.user'));
    RETURN NEW;
END $$;
CREATE TRIGGER note_call AFTER INSERT ON django_pglock_task FOR EACH ROW EXECUTE FUNCTION note_call();
"""


@pytest.fixture(scope="module", autouse=True)
def rules() -> None:
    with connections["owner"].cursor() as cursor:
        cursor.execute(RULES)


def callers() -> list[str]:
    with connections["owner"].cursor() as cursor:
        cursor.execute("SELECT by FROM called JOIN django_pglock_task ON id = task ORDER BY task")
        return [by for (by,) in cursor.fetchall()]


def test_each_way_to_enqueue_is_the_users():
    for user in ("anna", "ben", "anna"):
        with acting_as(user):
            nothing.enqueue("100%")
            nothing.using(priority=5).enqueue()
            enqueue_many(nothing, [{"number": 1}, {"number": 2}])
    assert callers() == ["anna"] * 4 + ["ben"] * 4 + ["anna"] * 4


def test_a_session_without_a_caller_is_refused_and_continues():
    for enqueue in (nothing.enqueue, lambda: enqueue_many(nothing, [{"number": 1}])):
        with pytest.raises(ProgrammingError, match="nobody calls"):
            enqueue()
        with pytest.raises(DatabaseError, match="nobody calls"), transaction.atomic(), lock("any"):
            enqueue()
    with acting_as("anna"), lock("any"):
        nothing.enqueue()
    assert callers() == ["anna"]
    assert not AdvisoryLock.objects.held().exists()


def test_a_worker_has_no_row_security_user_until_a_function_sets_one(drain):
    with acting_as("anna"):
        results = [write_for.enqueue(user, "a letter") for user in ("anna", "ben")]
    drain()
    for result in results:
        result.refresh()
        assert result.status == "SUCCESSFUL"
    with acting_as("ben"):
        assert Letter.objects.filter(text="a letter").count() == 1
