"""Which data of archived tasks is found, and with which rights."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock import enqueue_many
from django_pglock.errors import TaskOptionError
from django_pglock.models import Task
from django_pglock.store import archive_state
from django_pglock.store.archive_state import turn_on
from django_pglock.store.archived import archived_among, find_archived
from django_pglock.tasks.compat import TaskResultDoesNotExist
from tests.db.store.archiving import TWO_HOURS, fail, walk
from tests.db.store.test_prune import make
from tests.sample import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]


def test_the_result_of_a_moved_task_is_read_from_the_archive(claim, django_assert_num_queries):
    result = tasks.echo.enqueue(7)
    row = make(days=TWO_HOURS, task_path=tasks.echo.module_path, args=[7], attempts=2, result={"answer": 7})
    fail(row, 1)
    expected = tasks.echo.get_result(str(row.pk))
    turn_on("default")
    assert walk() == 1
    with django_assert_num_queries(2):
        found = tasks.echo.get_result(str(row.pk))
    assert found.return_value == {"answer": 7}
    assert found == expected
    assert found.task.max_attempts == row.max_retries + 1
    assert [error.traceback for error in found.errors] == ["Traceback 1"]
    assert found.worker_ids == expected.worker_ids
    found.refresh()
    assert found.wait(5).is_finished
    assert tasks.echo.get_result(result.id).status == "READY"


@pytest.mark.parametrize("is_many", [False, True])
def test_a_task_can_be_enqueued_after_one_in_the_archive(is_many):
    old, other = make(days=TWO_HOURS), make("READY", days=0, run_after=None)
    turn_on("default")
    assert walk() == 1

    def enqueue(*awaited):
        call = tasks.echo.using(after=awaited)
        return int(enqueue_many(call, [1])[0] if is_many else call.enqueue(1).id)

    both, alone = Task.objects.get(pk=enqueue(old.pk, other.pk)), Task.objects.get(pk=enqueue(old.pk))
    assert (both.status, both.waits_for, both.meta["after"]) == ("BLOCKED", 1, [old.pk, other.pk])
    assert (alone.status, alone.waits_for, alone.meta["after"]) == ("READY", 0, [old.pk])
    with pytest.raises(TaskOptionError, match="names a task that does not exist: 999999"):
        enqueue(old.pk, 999999)


def test_a_role_that_may_not_read_the_archive_is_not_refused():
    row = make(days=TWO_HOURS)
    turn_on("default")
    walk()
    with connection.cursor() as cursor:
        cursor.execute("DROP ROLE IF EXISTS without_archive")
        cursor.execute("CREATE ROLE without_archive")
        cursor.execute("GRANT SELECT ON django_pglock_task TO without_archive")
        cursor.execute("SET ROLE without_archive")
        archive_state._known.clear()
        try:
            with pytest.raises(TaskResultDoesNotExist):
                tasks.echo.get_result(str(row.pk))
        finally:
            cursor.execute("RESET ROLE")
            cursor.execute("DROP OWNED BY without_archive")
            cursor.execute("DROP ROLE without_archive")


def test_a_task_is_found_only_with_the_values_that_are_wanted():
    other, row = (make(days=TWO_HOURS, backend="second") for _ in range(2))
    turn_on("default")
    assert walk() == 2
    assert find_archived("default", other.pk, backend="second").pk == other.pk
    assert find_archived("default", row.pk, backend="second").pk == row.pk
    assert find_archived("default", row.pk, backend="default") is None


def test_archived_among_returns_only_ids_of_archived_tasks():
    old, young = make(days=TWO_HOURS), make(days=0.5 / 24)
    turn_on("default")
    assert walk() == 1
    assert archived_among("default", [old.pk, young.pk, 10**12]) == {old.pk}
    assert archived_among("default", []) == set()
