"""Tasks to which rows of the project refer are kept, and all others are deleted."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction

from django_pglock.models import Task
from django_pglock.store.prune import prune_window, warn_of_references
from django_pglock.store.references import refusing_keys
from django_pglock.worker.upkeep import upkeep
from tests.db.store.test_prune import ago, keep, left, make
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def refer():
    """Make a table of the project that refers to a task, with a rule for the deletion of the task."""

    def refer(row, rule="DEFERRABLE INITIALLY DEFERRED"):
        with connection.cursor() as cursor:
            cursor.execute(f'CREATE TABLE "keeps %task" ("a task" bigint REFERENCES django_pglock_task (id) {rule})')
            cursor.execute('INSERT INTO "keeps %%task" VALUES (%s)', (row.pk,))

    yield refer
    with connection.cursor() as cursor:
        cursor.execute('DROP TABLE "keeps %task" CASCADE')


def test_a_table_that_refers_to_tasks_keeps_these_tasks_and_no_others(worker, eventually, caplog, refer, monkeypatch):
    monkeypatch.setattr(upkeep, "PRUNED_AT_ONCE", 2)
    row, others = make(), [make() for _ in range(3)]
    expired = make("FAILED", days=0, keep_result=0, expires_at=ago(0.1))
    refer(row)
    worker()
    eventually(lambda: not any(keep(each) for each in (*others, expired)))
    assert caplog.text.count('Old tasks to which rows of "keeps %task" refer are not pruned') == 1
    tasks.nothing.using(run_after=timedelta(seconds=0.01)).enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL", finished_at__gt=ago(1)).exists())
    assert "lost its database connection" not in caplog.text
    assert keep(row)


@pytest.mark.parametrize("rule", ["", "ON DELETE RESTRICT", "DEFERRABLE INITIALLY DEFERRED"])
def test_prune_and_delete_keep_tasks_that_other_rows_refer_to(refer, rule, caplog):
    row, others = make(), [make() for _ in range(3)]
    refer(row, rule)
    assert Task.objects.all().prune(dry_run=True) == 3
    assert Task.objects.filter(pk__in=[row.pk, others[0].pk]).delete_finished() == 1
    with transaction.atomic():
        assert Task.objects.filter(pk__in=[row.pk, others[1].pk]).delete_finished() == 1
    assert Task.objects.all().prune() == 1
    assert left() == {row.pk}
    known = set()
    for _ in range(2):
        warn_of_references("default", known)
    assert caplog.text.count("are not pruned") == 1


@pytest.mark.parametrize("rule", ["ON DELETE CASCADE", "ON DELETE SET NULL"])
def test_prune_deletes_tasks_whose_references_the_database_deletes_or_clears(refer, rule):
    refer(make(), rule)
    assert Task.objects.all().prune() == 1


def test_a_role_that_may_not_read_the_table_prunes_what_it_can(refer, caplog):
    row, other = make(), make()
    refer(row)
    with connection.cursor() as cursor:
        cursor.execute("CREATE ROLE reads_nothing; GRANT ALL ON ALL TABLES IN SCHEMA public TO reads_nothing")
        cursor.execute('REVOKE ALL ON "keeps %task" FROM reads_nothing; SET ROLE reads_nothing')
        try:
            assert refusing_keys("default") == []
            assert prune_window("default", 0, {"SUCCESSFUL": 7}, batch=1) == (0, row.pk)
            assert prune_window("default", row.pk, {"SUCCESSFUL": 7}, batch=1) == (1, other.pk)
            assert caplog.text.count("are not deleted, because the database refuses it") == 1
        finally:
            cursor.execute("RESET ROLE; DROP OWNED BY reads_nothing; DROP ROLE reads_nothing")
    assert keep(row)
