"""A redrive is a task. It snoozes between two batches, and a group has one redrive at a time."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from django_pglock.store.bulk import HIGHEST_RATE, LOWEST_RATE, change_tasks, enqueue_redrive, redrives
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import Snooze
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db(transaction=True)


def retried():
    return Task.objects.filter(queue="elsewhere", status="READY").count()


def run_once(claim):
    """Run the redrive once, as a worker does."""
    [mine] = claim(queue=OWN_QUEUE)
    context = TaskContext(
        task_result=change_tasks.get_result(str(mine.id)), _claims=[mine], _reason_to_stop=lambda: None
    )
    return change_tasks.func(context, "retry", **Task.objects.get(pk=mine.id).kwargs)


def test_a_worker_retries_all_of_them_and_reports(worker, eventually):
    for _ in range(5):
        fail(fingerprint=7, queue="elsewhere")
    made, is_new = enqueue_redrive("default", 7, 20)
    assert is_new
    assert redrives("default", [6, 7])[7].pk == made
    worker(queues=["default"])
    ended = eventually(lambda: Task.objects.filter(pk=made, status="SUCCESSFUL").first())
    assert (ended.result, ended.progress["done"], ended.progress["total"]) == (5, 5, 5)
    assert retried() == 5
    assert redrives("default", [6, 7]) == {}


@pytest.mark.parametrize(("rate", "batch", "longest"), [(2.9, 2, 2 / 2.9), (0.5, 1, 2.0)])
def test_a_batch_takes_as_long_as_the_rate_wants(claim, rate, batch, longest):
    for _ in range(5):
        fail(fingerprint=7, queue="elsewhere")
    enqueue_redrive("default", 7, rate)
    with pytest.raises(Snooze) as snoozed:
        run_once(claim)
    assert retried() == batch
    assert 0 <= snoozed.value.seconds <= longest


def test_a_redrive_whose_worker_died_after_a_batch_keeps_its_rate(claim):
    """The batch is committed and its snooze is lost, so the rescued task runs at once."""
    for _ in range(3):
        fail(fingerprint=7, queue="elsewhere")
    made, _ = enqueue_redrive("default", 7, 1 / 600)
    for _ in range(3):
        with pytest.raises(Snooze) as snoozed:
            run_once(claim)
        assert retried() == 1
        assert 0 < snoozed.value.seconds <= 600
        Task.objects.filter(pk=made).update(status="READY", worker=None)
    row = Task.objects.get(pk=made)
    row.progress["next_at"] += 86_400
    row.save(update_fields=["progress"])
    with pytest.raises(Snooze) as snoozed:
        run_once(claim)
    assert snoozed.value.seconds <= 600, "also if the server's clock has stepped back by a day"


def test_a_redrive_that_is_cancelled_leaves_the_rest(claim):
    rows = [fail(fingerprint=7, queue="elsewhere") for _ in range(3)]
    made, _ = enqueue_redrive("default", 7, 1)
    with pytest.raises(Snooze):
        run_once(claim)
    Task.objects.filter(pk=made).update(status="READY")
    assert Task.objects.filter(pk=made).cancel() == 1
    assert claim(queue=OWN_QUEUE) == []
    assert [Task.objects.get(pk=row.pk).status for row in rows] == ["READY", "FAILED", "FAILED"]


def test_a_group_has_one_redrive_at_a_time():
    first, _ = enqueue_redrive("default", 7, 1)
    assert enqueue_redrive("default", 7, 5) == (first, False)
    assert enqueue_redrive("default", 8, 1)[1]
    Task.objects.all().cancel()
    assert enqueue_redrive("default", 7, 1)[1]


@pytest.mark.parametrize("rate", [0, -1, LOWEST_RATE / 2, HIGHEST_RATE + 1, float("nan"), float("inf")])
def test_an_invalid_rate_is_refused(rate):
    with pytest.raises(ValueError, match="tasks a second"):
        enqueue_redrive("default", 7, rate)
    assert not Task.objects.exists()
