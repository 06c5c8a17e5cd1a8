"""Return values of task functions, and tasks whose result cannot be stored."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from django_pglock import enqueue_many
from django_pglock.errors import PGLockError, TaskArgumentsError, TaskResultError
from django_pglock.models import Task
from django_pglock.store.attempts import result_of_row
from django_pglock.testing import run_tasks
from tests.db.store.test_attempts import fail
from tests.db.store.test_prune import ago, make
from tests.sample import result_tasks as sample
from tests.sample import tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def failed(worker, eventually):
    """Run the enqueued tasks; return the text of the only failure of each task."""
    worker(threads=1)

    def wait(result):
        row = eventually(lambda: Task.objects.filter(pk=result.id, status="FAILED").first())
        assert (row.attempts, row.retries) == (1, 0)
        [failure] = row.failures.all()
        assert failure.exception_path == "django_pglock.errors.TaskResultError"
        return failure.traceback

    return wait


ODD = {
    "date": "cannot be stored as JSON: it is a datetime; pass its isoformat().",
    "nested": "cannot be stored as JSON: it contains a datetime at ['rows'][1]['at']; pass its isoformat().",
    "set": "cannot be stored as JSON: it contains a set at […]; pass list() of it.",
    "nan": "cannot be stored as JSON: it contains NaN or infinity at [0].",
    "bytes": "cannot be stored as JSON: it contains bytes that are not UTF-8 at [0].",
    "key": "cannot be stored as JSON: it contains a dict with keys of type int instead of str at ['a'].",
    "nul": "contains a NUL character",
    "unreadable": "cannot be read: LookupError.",
}


def test_a_result_that_is_no_json_fails_at_once_and_is_named(failed):
    """The function has run. Another run would repeat its effects and return the same value."""
    for number, (kind, words) in enumerate(ODD.items(), 1):
        text = failed(sample.return_odd.enqueue(kind))
        assert f"The return value of tests.sample.result_tasks.return_odd {words}" in text
        assert Effect.objects.filter(name="outside").count() == number, kind


def test_an_invalid_result_fails_a_coroutine(failed):
    assert "it is a datetime" in failed(sample.return_odd_async.enqueue("date"))


def test_effects_of_an_atomic_function_are_rolled_back_with_it(failed):
    assert "it is a datetime" in failed(sample.return_odd_atomically.enqueue("date"))
    assert not Effect.objects.exists()


def test_an_invalid_result_fails_each_task_of_a_group(failed):
    for id_ in enqueue_many(sample.return_odd_together, [{"kind": "date"}, {"kind": "date"}]):
        assert "it is a datetime" in failed(Task(id=id_))
    assert Effect.objects.filter(name="outside").count() == 1


def test_a_result_has_the_options_with_which_its_task_was_enqueued():
    later = timezone.now().replace(microsecond=0) + timedelta(days=1)
    call = tasks.echo.using(priority=7, queue_name="other", run_after=later, max_attempts=4)
    found = tasks.echo.get_result(call.enqueue(1).id).task
    assert (found.priority, found.queue_name, found.run_after, found.max_attempts) == (7, "other", later, 4)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Adak"])
@pytest.mark.parametrize("use_tz", [True, False])
def test_the_first_and_the_last_date_that_a_row_can_have_are_read(settings, zone, use_tz):
    """A plain INSERT writes such a date. The worker and ``get_result()`` make the same result of the row."""
    settings.TIME_ZONE, settings.USE_TZ = zone, use_tz
    execute_sql(
        "INSERT INTO django_pglock_task (queue, backend, task_path, run_after) "
        "SELECT 'default', 'default', %s, date::timestamptz "
        "FROM unnest(ARRAY['0001-01-02 00:00+00', '9999-12-30 00:00+00']) AS date",
        [tasks.nothing.module_path],
    )
    run_tasks()
    rows = Task.objects.order_by("id")
    assert [row.status for row in rows] == ["SUCCESSFUL", "SUCCESSFUL"]
    for row in rows:
        assert tasks.nothing.get_result(str(row.pk)).task.run_after == row.run_after


def test_a_result_has_the_dates_of_its_task_and_the_workers_of_its_attempts():
    row = make("FAILED", attempts=3, uncounted=1, started_at=ago(3), last_attempted_at=ago(2))
    first, last = fail(row, 1), fail(row, 2, worker=None)
    row.refresh_from_db()
    found = result_of_row(row)
    assert (found.started_at, found.last_attempted_at) == (row.started_at, row.last_attempted_at)
    assert (found.enqueued_at, found.finished_at) == (row.enqueued_at, row.finished_at)
    assert found.worker_ids == [str(first.worker)]
    last.delete()
    assert result_of_row(row).worker_ids == [str(first.worker), str(row.worker)]


def test_an_argument_that_is_no_json_raises_a_type_error():
    """https://docs.djangoproject.com/en/6.0/topics/tasks/: "a TypeError will be raised"."""
    with pytest.raises(TypeError) as refused:
        tasks.echo.enqueue(object())
    assert isinstance(refused.value, TaskArgumentsError)
    for kind in (TaskArgumentsError, TaskResultError):
        assert issubclass(kind, TypeError)
        assert issubclass(kind, ValueError)
        assert issubclass(kind, PGLockError)


def test_arguments_that_are_too_large_together_are_named_together(settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "ARGUMENTS_LIMIT": 100}
    with pytest.raises(TaskArgumentsError, match=r"^The positional arguments of tests\.\S+\.record is 104 bytes"):
        tasks.record.enqueue("x" * 49, "y" * 48)
