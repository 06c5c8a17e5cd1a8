"""The context of a running task: its progress, its metadata and its token."""

from __future__ import annotations

import pytest

from django_pglock.errors import TaskArgumentsError, TaskOptionError
from django_pglock.models import Task
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.compat import TaskContext as DjangoTaskContext
from django_pglock.tasks.options import OWN_META
from tests.sample import running_tasks as running
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def wait_for_end(result, eventually, seconds=15.0):
    rows = Task.objects.filter(pk=result.id, finished_at__isnull=False)
    return eventually(lambda: rows.first(), seconds=seconds, why=f"task {result.id} did not end")


def test_the_task_context_extends_the_context_of_django(claim):
    tasks.nothing.using(meta={"trace": "abc", "n": [1]}, timeout=5).enqueue()
    [mine] = claim()
    context = TaskContext(task_result=None, _claims=[mine], _reason_to_stop=lambda: None)
    assert isinstance(context, DjangoTaskContext)
    assert context.meta == {"trace": "abc", "n": [1]}
    assert context.fencing_token == 1
    assert repr(context) == "TaskContext(task_result=None)", "no arguments of a call"
    context.check()
    for wrong in (float("nan"), float("inf"), object(), "\x00"):
        with pytest.raises(TaskArgumentsError):
            context.progress(wrong)
    assert mine.progress is None


def test_the_context_of_a_group_is_that_of_its_first_call(claim):
    for trace in ("first", "second"):
        tasks.nothing.using(meta={"trace": trace}).enqueue()
    claims = [*claim(), *claim()]
    claims[1].attempt = 5
    context = TaskContext(task_result=None, _claims=claims, _reason_to_stop=lambda: None)
    assert (context.meta, context.fencing_token) == ({"trace": "first"}, 1)
    context.progress(1, 2)
    assert [each.progress for each in claims] == ['{"done":1,"total":2}'] * 2
    with pytest.raises(TaskArgumentsError, match="The progress of a task"):
        context.progress(float("nan"))


@pytest.mark.parametrize("name", OWN_META)
def test_meta_refuses_the_names_that_the_package_uses(name):
    with pytest.raises(TaskOptionError, match=f"meta has {name}, which"):
        tasks.nothing.using(meta={name: "mine", "trace": "abc"})


def test_the_context_of_a_running_task_has_its_meta_and_token(worker, eventually):
    worker()
    assert wait_for_end(running.tell.using(meta={"trace": "abc"}).enqueue(1), eventually).result == {"trace": "abc"}
    assert wait_for_end(running.tell_atomically.enqueue(), eventually).result == 1


def test_the_context_has_earlier_errors_after_a_retry_by_hand(worker, eventually):
    """A retry by hand resets the count of retries, but keeps the failed attempts."""
    worker()
    result = running.errors_so_far.enqueue(2)
    for _ in range(2):
        assert wait_for_end(result, eventually).status == "FAILED"
        assert Task.objects.filter(pk=result.id).retry() == 1
    assert wait_for_end(result, eventually).result == [2, 3]
