"""Bulk changes and redrives as tasks: their batches, their progress, their cancel, and a second run after a crash."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock.errors import ClaimLost, ConfigurationError, TaskCancelled, TaskStopped
from django_pglock.models import Task
from django_pglock.store import bulk
from django_pglock.store.bulk import (
    HIGHEST_RATE,
    LOWEST_RATE,
    Work,
    change_batch,
    change_tasks,
    enqueue_change,
    enqueue_redrive,
    next_ids,
    redrives,
)
from django_pglock.store.operate import CANCEL, RETRY
from django_pglock.tasks.claim import TaskContext
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.retry import Snooze
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db(transaction=True)


def statuses(rows):
    return [Task.objects.get(pk=row.pk).status for row in rows]


@pytest.mark.parametrize(
    "served",
    [
        {},
        {"queues": ["mail"]},
        {"queues": ["mail=2"]},
        {"exclude": ["elsewhere", "django*"]},
        {"backend": "urgent"},
    ],
)
def test_each_worker_runs_a_bulk_change_whatever_it_serves(worker, eventually, served, settings):
    settings.TASKS = {**settings.TASKS, "urgent": settings.TASKS["default"]}
    rows = [make("FAILED", queue="elsewhere") for _ in range(3)]
    [made] = enqueue_change("default", RETRY, [row.pk for row in rows[:2]])
    worker(**{"exclude": ["elsewhere"], **served})
    ended = eventually(lambda: Task.objects.filter(pk=made, status="SUCCESSFUL").first())
    assert ended.result == 2
    assert statuses(rows) == ["READY", "READY", "FAILED"], "only those that a person has confirmed"


def context_of(claim, reason=lambda: None):
    [mine] = claim(queue=OWN_QUEUE)
    result = change_tasks.get_result(str(mine.id))
    return TaskContext(task_result=result, _claims=[mine], _reason_to_stop=reason), mine


def test_a_cancelled_bulk_change_ends_after_the_current_window(claim, monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW", 2)
    rows = [make("FAILED", queue="elsewhere") for _ in range(5)]
    enqueue_change("default", RETRY, [row.pk for row in rows])
    answers = iter([None, None, TaskCancelled("somebody has asked")])
    context, mine = context_of(claim, lambda: next(answers))
    with pytest.raises(TaskStopped):
        change_tasks.func(context, "retry", [row.pk for row in rows])
    assert statuses(rows) == ["READY"] * 4 + ["FAILED"]
    progress = Task.objects.get(pk=mine.id).progress
    assert (progress["done"], progress["total"]) == (4, 5)


def test_a_bulk_change_whose_worker_died_continues_behind_its_last_batch(claim, monkeypatch):
    monkeypatch.setattr(bulk, "WINDOW", 2)
    rows = [make("FAILED", queue="elsewhere") for _ in range(3)]
    ids = [row.pk for row in rows]
    enqueue_change("default", RETRY, ids)
    answers = iter([None, TaskCancelled("as if it were killed here")])
    context, mine = context_of(claim, lambda: next(answers))
    with pytest.raises(TaskStopped):
        change_tasks.func(context, "retry", ids)
    Task.objects.filter(pk=mine.id).update(status="READY", worker=None)
    Task.objects.filter(pk=ids[0]).update(status="FAILED", finished_at=Now() - timedelta(days=1))
    context, _ = context_of(claim)
    assert change_tasks.func(context, "retry", ids) == 3, "of both attempts"
    assert statuses(rows) == ["FAILED", "READY", "READY"], "the first batch is not repeated"


def test_a_repeated_bulk_retry_does_not_retry_tasks_that_failed_again(claim):
    """The first run has retried the task, which then failed again."""
    row = make("FAILED", queue="elsewhere")
    enqueue_change("default", RETRY, [row.pk])
    context, _ = context_of(claim)
    Task.objects.filter(pk=row.pk).update(finished_at=Now() + timedelta(seconds=1))
    assert change_tasks.func(context, "retry", [row.pk]) == 0


def test_a_bulk_change_of_too_many_ids_is_several_tasks(monkeypatch):
    monkeypatch.setattr(bulk, "MOST_IDS", 2)
    made = enqueue_change("default", CANCEL, [3, 2, 1])
    assert [Task.objects.get(pk=each).args for each in made] == [["cancel", [3, 2]], ["cancel", [1]]]


def test_a_database_without_a_backend_is_refused():
    with pytest.raises(ConfigurationError, match="'elsewhere'"):
        enqueue_change("elsewhere", CANCEL, [1])


# A redrive retries the tasks of a group in the order of their ids, each once, and knows how far it has come.


#: After the first failures of the tests, and before their second failures.
LATER = timedelta(hours=1)


@pytest.fixture
def step():
    """Retry the next tasks as one running task does."""
    # Not the first id of the table, which a test gives to a failed task.
    own = make("RUNNING", attempts=1, pk=10**9)

    def step(limit=2, attempt=1):
        before = timezone.now() + LATER
        work = Work("retry", fingerprint=7)
        return change_batch("default", work, before=before, limit=limit, by=own.pk, attempt=attempt)[:2]

    step.own = own
    return step


def test_each_step_of_a_redrive_retries_a_batch_until_all_are_done(step):
    rows = [fail(fingerprint=7) for _ in range(5)]
    other, running = fail(fingerprint=8), make("RUNNING", attempts=1)
    assert step() == (2, False)
    assert statuses(rows) == ["READY"] * 2 + ["FAILED"] * 3
    assert step() == (4, False)
    assert step() == (5, True)
    assert statuses([*rows, other]) == ["READY"] * 5 + ["FAILED"]
    step.own.refresh_from_db()
    assert step.own.progress == {**step.own.progress, "done": 5, "total": 5, "position": rows[-1].pk}
    assert Task.objects.get(pk=running.pk).progress is None


def test_the_first_task_of_the_table_is_retried(step):
    first = fail(fingerprint=7, pk=1)
    assert step() == (1, True)
    assert statuses([first]) == ["READY"]


def test_a_redrive_does_not_retry_a_task_that_has_failed_again(step):
    """Otherwise a redrive of tasks that always fail would never end."""
    rows = [fail(fingerprint=7) for _ in range(3)]
    step()
    Task.objects.filter(pk=rows[0].pk).update(status="FAILED", finished_at=Now() + 2 * LATER, fingerprint=7)
    late = fail(fingerprint=7)
    Task.objects.filter(pk=late.pk).update(finished_at=Now() + 2 * LATER)
    assert step() == (3, True)
    assert statuses([*rows, late]) == ["FAILED", "READY", "READY", "FAILED"]


def test_a_redrive_does_not_retry_a_discarded_task(step, monkeypatch):
    rows = [fail(fingerprint=7) for _ in range(2)]

    def find(*values):
        ids, position = next_ids(*values)
        Task.objects.filter(pk=ids[0]).discard()
        return ids, position

    monkeypatch.setattr(bulk, "next_ids", find)
    assert step() == (1, False)
    assert statuses(rows) == ["CANCELLED", "READY"]


def test_a_worker_that_has_lost_the_claim_retries_nothing(step):
    rows = [fail(fingerprint=7)]
    with pytest.raises(ClaimLost):
        step(attempt=2)
    Task.objects.filter(pk=step.own.pk).update(status="READY")
    with pytest.raises(ClaimLost):
        step()
    assert statuses(rows) == ["FAILED"]


def test_tasks_that_cannot_be_retried_are_skipped(step):
    """The unique key belongs to another task. Without the skip, the redrive would read the same tasks forever."""
    make("READY", unique_key="taken", unique_scope="UNFINISHED")
    rows = [fail(fingerprint=7, unique_key="taken", unique_scope="UNFINISHED") for _ in range(2)]
    rows.append(fail(fingerprint=7))
    assert step() == (0, False)
    assert step() == (1, True)
    assert statuses(rows) == ["FAILED", "FAILED", "READY"]


def test_a_redrive_of_an_empty_group_ends_at_the_first_step(step):
    assert step() == (0, True)


# A redrive is a task. It snoozes between two batches, and a group has one redrive at a time.


def retried():
    return Task.objects.filter(queue="elsewhere", status="READY").count()


def run_once(claim):
    """Run the redrive once, as a worker does."""
    context, mine = context_of(claim)
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
