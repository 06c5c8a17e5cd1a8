"""If a trigger refuses the deletion of some tasks, only these tasks are kept."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, DataError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store import refusals
from django_pglock.store.prune import prune_window
from tests.db.store.test_prune import ago, left, make

pytestmark = pytest.mark.django_db(transaction=True)

RAISE = "RAISE EXCEPTION 'kept by law'"
AS_A_KEY = f"{RAISE} USING ERRCODE = 'foreign_key_violation'"
CHANGE = "UPDATE django_pglock_task SET meta = '{\"deleted\": true}' WHERE id = OLD.id"


@pytest.fixture
def refuse():
    """Make a trigger of the project that refuses the deletion of some tasks."""

    def refuse(rows, action=RAISE):
        ids = ", ".join(str(row.pk) for row in rows)
        with connection.cursor() as cursor:
            cursor.execute(
                f"""CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
                    BEGIN IF OLD.id IN ({ids}) THEN {action}; END IF; RETURN OLD; END $$;
                    CREATE TRIGGER refuse BEFORE DELETE ON django_pglock_task FOR EACH ROW EXECUTE FUNCTION refuse()"""
            )

    yield refuse
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION refuse() CASCADE")


@pytest.mark.parametrize("action", [RAISE, AS_A_KEY, CHANGE])
def test_prune_keeps_tasks_whose_deletion_a_trigger_refuses_and_deletes_the_others(refuse, action, caplog):
    rows = [make() for _ in range(9)]
    kept = make(days=0, keep_result=0, expires_at=ago(2))
    expired = [make(days=0, keep_result=0, expires_at=ago(1)) for _ in range(3)]
    refuse([rows[2], rows[3], kept], action)
    assert Task.objects.all().prune(batch=4) == len(rows) - 2 + len(expired)
    assert left() == {rows[2].pk, rows[3].pk, kept.pk}
    [record] = caplog.records
    assert f"Some finished tasks are not deleted: the database refuses it, as for task {kept.pk}: " in record.message
    assert "refuse()" in record.message or action == CHANGE


def test_prune_window_continues_after_tasks_whose_deletion_is_refused(refuse):
    rows = [make() for _ in range(5)]
    refuse([rows[0], rows[4]])
    assert prune_window("default", 0, {"SUCCESSFUL": 7}, batch=3) == (2, rows[2].pk)
    assert prune_window("default", rows[2].pk, {"SUCCESSFUL": 7}, batch=3) == (1, rows[4].pk)
    assert left() == {rows[0].pk, rows[4].pk}


def test_a_batch_in_which_a_deletion_is_refused_deletes_no_more_tasks_than_others(refuse):
    expired = [make(days=0, keep_result=0, expires_at=ago(9 - number)) for number in range(4)]
    refuse(expired[:1])
    assert prune_window("default", 0, {}, batch=2) == (1, 0)
    assert left() == {expired[number].pk for number in (0, 2, 3)}


def test_another_error_is_raised(refuse):
    refuse([make()], "PERFORM 1 / 0")
    with pytest.raises(DataError, match="division by zero"):
        Task.objects.all().prune()


def test_delete_finished_keeps_tasks_whose_deletion_is_refused(refuse, caplog):
    rows = [make(days=0) for _ in range(5)]
    refuse([rows[1]])
    assert Task.objects.filter(pk__gt=rows[0].pk).delete_finished() == 3
    assert left() == {rows[0].pk, rows[1].pk}
    assert f"as for task {rows[1].pk}: kept by law" in caplog.text


def test_a_refused_deletion_raises_in_a_transaction_of_the_caller(refuse):
    rows = [make() for _ in range(3)]
    refuse(rows[2:])
    with pytest.raises(DatabaseError, match="kept by law"), transaction.atomic():
        Task.objects.all().prune()
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        with pytest.raises(DatabaseError, match="kept by law"):
            Task.objects.all().prune()
        cursor.execute("ROLLBACK")
    assert left() == {row.pk for row in rows}


def test_prune_sends_few_statements_if_all_deletions_are_refused(refuse, monkeypatch):
    monkeypatch.setattr(refusals, "MOST", 3)
    rows = [make() for _ in range(64)]
    refuse(rows)
    with CaptureQueriesContext(connection) as queries:
        assert Task.objects.all().prune() == 0
    deletions = sum("DELETE" in each["sql"] for each in queries)
    # Halving leads to the first task. Then come the task next to it, and each larger half.
    assert deletions <= 20
    assert len(left()) == 64
