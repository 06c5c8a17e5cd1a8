"""Tasks that gather children: fan-out, and fan-in whatever has come of them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext

from django_pglock import Rate
from django_pglock.errors import ClaimLost, TaskCancelled
from django_pglock.models import Step, Task, Waiter
from django_pglock.store.admit import admit
from django_pglock.store.children import write_gather
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.store.release import orphaned_waiters, release
from django_pglock.store.steps import RecordedSteps
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks import registry
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.step_records import StepEnded, Suspension
from django_pglock.testing import run_tasks
from tests.conftest import NEVER
from tests.db.store.endings import FAILURE, settle_one
from tests.sample import step_tasks as sample
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _fresh():
    for each in (sample.CALLS, sample.FAILING, sample.CHILDREN):
        each.clear()


def outcomes(**options):
    return [each.outcome for each in run_tasks(**options)]


def refreshed(result):
    result.refresh()
    return result


def steps_of(claimed):
    return RecordedSteps("default", claimed, registry.find(claimed.task_path))


def left_by(claimed):
    """Return with what a function is left that calls ``gather``."""
    with pytest.raises(Suspension) as left:
        steps_of(claimed).gather("children", sample.CHILDREN)
    return left.value


@pytest.fixture
def parent(claim):
    """Claim a task that gathers these calls, and suspend it."""

    def gather(*calls, task=sample.family, arguments=()):
        sample.CHILDREN[:] = calls
        result = task.enqueue(*arguments)
        [claimed] = claim()
        assert claimed.id == int(result.id)
        write_gather("default", claimed, left_by(claimed))
        return claimed

    return gather


def status_of(claimed):
    return Task.objects.get(pk=claimed.id).status


# From the calls to the results


def test_the_results_of_all_children_are_in_the_order_of_their_calls():
    calls = [sample.child.call_of(2), sample.achild.call_of(1), sample.child.using(priority=5).call_of(number=7)]
    sample.CHILDREN[:] = [*calls, sample.child.call_of(3, how="raises"), sample.child.call_of(4, how="cancels")]
    sample.CHILDREN.append(sample.child.using(max_attempts=2).call_of(5))
    sample.FAILING["child 5"] = 1
    result = sample.family.enqueue()
    assert outcomes()[0] == "snoozed"
    ended = [["SUCCESSFUL", 20], ["SUCCESSFUL", 100], ["SUCCESSFUL", 70], *[["FAILED", None]] * 2, ["SUCCESSFUL", 50]]
    assert refreshed(result).return_value == ended
    parent = Task.objects.get(pk=result.id)
    assert parent.attempts_made == 1, "to wait for children is no attempt"
    assert Task.objects.get(args=[], kwargs={"number": 7}).priority == 5


def test_a_coroutine_gathers_children():
    sample.CHILDREN[:] = [sample.achild.call_of(1), sample.child.call_of(2)]
    result = sample.afamily.enqueue()
    outcomes(until="due")
    assert refreshed(result).return_value == [["SUCCESSFUL", 100], ["SUCCESSFUL", 20]]


def test_without_calls_the_task_is_not_suspended():
    result = sample.family.enqueue()
    assert outcomes() == ["succeeded"]
    assert refreshed(result).return_value == []
    assert Step.objects.get(name="children").kind == "CHILDREN"


def test_the_calls_are_read_and_written_once():
    """A later run takes what is recorded, also if its calls would be others."""
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    sample.FAILING["after"] = 1
    result = sample.family.enqueue()
    runs = iter(run_tasks(until="due"))
    assert [each.outcome for each in runs] == ["snoozed", "succeeded", "retried", "succeeded"]
    sample.CHILDREN[:] = []
    assert refreshed(result).return_value == [["SUCCESSFUL", 10]]
    assert sample.CALLS.count("child 1") == 1


def test_a_call_with_positional_and_with_named_arguments_and_with_options():
    call = sample.child.using(priority=3).call_of(1, how="cancels")
    assert (call.task.priority, call.args, call.kwargs) == (3, (1,), {"how": "cancels"})


def test_a_gather_is_few_statements_also_if_each_call_has_options_of_its_own(claim):
    """Its last one suspends the parent, and writes the record and the waiters."""
    sample.CHILDREN[:] = [sample.child.using(priority=5).call_of(number) for number in range(30)]
    sample.family.enqueue()
    [claimed] = claim()
    how = left_by(claimed)
    with CaptureQueriesContext(connection) as sent:
        write_gather("default", claimed, how)
    texts = [each["sql"] for each in sent if "pglock_worker" not in each["sql"]]
    assert len(texts) == 4
    assert texts[0] == "BEGIN"
    assert 'INSERT INTO "django_pglock_task"' in texts[1]
    assert texts[3] == "COMMIT"
    assert Task.objects.filter(priority=5).count() == 30


def test_thousands_of_children_are_written_by_few_statements(claim):
    sample.CHILDREN[:] = [sample.child.call_of(number) for number in range(12_000)]
    sample.family.enqueue()
    [claimed] = claim()
    how = left_by(claimed)
    with CaptureQueriesContext(connection) as sent:
        write_gather("default", claimed, how)
    assert sum('INSERT INTO "django_pglock_task"' in each["sql"] for each in sent) <= 12
    assert Task.objects.get(pk=claimed.id).waits_for == Waiter.objects.count() == 12_000


def test_a_call_without_a_worker_runs_its_children_at_once():
    sample.CHILDREN[:] = [sample.child.call_of(1), sample.child.call_of(2, how="raises"), sample.achild.call_of(3)]
    assert sample.family.call() == [["SUCCESSFUL", 10], ["FAILED", None], ["SUCCESSFUL", 300]]
    assert not Task.objects.exists()


def test_a_coroutine_without_a_worker_runs_its_children_at_once():
    sample.CHILDREN[:] = [sample.child.call_of(1), sample.achild.call_of(3)]
    assert asyncio.run(sample.afamily.acall()) == [["SUCCESSFUL", 10], ["SUCCESSFUL", 300]]


# The result stays that of the end


def retry_children():
    """Retry what has not succeeded. It will succeed."""
    Task.objects.filter(task_path__endswith=".child").exclude(status="SUCCESSFUL").update(kwargs={})
    Task.objects.filter(task_path__endswith=".child").retry()


def shown(results):
    return [
        (each.id, each.status, each.finished_at, each._return_value, [error.traceback for error in each.errors])
        for each in results
    ]


def test_a_child_that_is_retried_after_the_gather_keeps_its_result_in_each_later_run():
    sample.CHILDREN[:] = [sample.child.call_of(1), sample.child.call_of(2), sample.child.call_of(3, how="cancels")]
    sample.FAILING.update({"child 2": 1})
    parent = Task.objects.get(pk=sample.family.enqueue().id)
    outcomes()
    seen = Task.objects.results(Step.objects.get(name="children").result["children"])
    assert [each.status.value for each in seen] == ["SUCCESSFUL", "FAILED", "FAILED"]
    retry_children()
    assert outcomes() == ["succeeded"] * 2
    claimed = Claim(parent.pk, 3, uuid4(), "default", "default", 0, parent.task_path)
    assert shown(steps_of(claimed).gather("children", [])) == shown(seen)
    assert shown(steps_of(claimed)["children"]) == shown(seen)


def test_a_child_that_is_retried_before_its_parent_has_seen_the_end_is_waited_for_again(parent, claim):
    suspended = parent(sample.child.call_of(1), sample.child.call_of(2))
    first, second = claim(2)
    settle_one(first, Succeeded())
    settle_one(second, Failed(FAILURE))
    assert status_of(suspended) == "READY"
    Task.objects.filter(pk=second.id).retry()
    [again] = [each for each in claim(2) if each.id == suspended.id]
    with pytest.raises(Suspension) as left:
        steps_of(again).gather("children", [])
    write_gather("default", again, left.value)
    assert status_of(suspended) == "BLOCKED"
    settle_one(replace(second, attempt=2), Succeeded('"at last"'))
    assert status_of(suspended) == "READY"
    [last] = claim()
    assert [each.return_value for each in steps_of(last).gather("children", [])] == [None, "at last"]
    assert Task.objects.get(pk=suspended.id).attempts_made == 1


def test_pruning_keeps_the_children_until_their_parent_has_ended(parent, claim):
    parent(sample.child.call_of(1), sample.child.call_of(2))
    for each in claim(2):
        settle_one(each, Succeeded())
    orphaned_waiters("default", 0)
    assert Task.objects.prune(older_than=0) == 0
    [again] = claim()
    assert len(steps_of(again).gather("children", [])) == 2
    settle_one(again, Succeeded())
    orphaned_waiters("default", 0)
    assert Task.objects.prune(older_than=0) == 3
    assert not Waiter.objects.exists()


def test_a_failed_parent_keeps_its_children_for_a_retry(parent, claim):
    parent(sample.child.call_of(1))
    settle_one(claim()[0], Succeeded())
    [again] = claim()
    steps_of(again).gather("children", [])
    settle_one(again, Failed(FAILURE))
    orphaned_waiters("default", 0)
    assert Task.objects.filter(status="SUCCESSFUL").prune(older_than=0) == 0
    Task.objects.retry()
    assert outcomes() == ["succeeded"]
    orphaned_waiters("default", 0)
    assert Task.objects.prune(older_than=0) == 2


# The claim


def test_a_parent_that_has_lost_its_claim_enqueues_nothing(claim):
    """As a frozen worker that wakes after its rescue."""
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    sample.family.enqueue()
    [lost] = claim()
    how = left_by(lost)
    Task.objects.update(attempts=2)
    with pytest.raises(ClaimLost):
        write_gather("default", lost, how)
    assert Task.objects.count() == 1
    assert not Step.objects.exists()


def test_a_frozen_attempt_and_its_successor_enqueue_the_children_once(claim, in_threads):
    """The frozen one is stopped before its last statement, and its claim is rescued meanwhile."""
    sample.CHILDREN[:] = [sample.child.call_of(number) for number in range(3)]
    sample.family.enqueue()
    [frozen] = claim()
    how = left_by(frozen)
    enqueued, rescued = threading.Event(), threading.Event()

    def stop_before_the_last(execute, sql, params, many, context):
        if "waits_for" in sql:
            enqueued.set()
            assert rescued.wait(NEVER)
        return execute(sql, params, many, context)

    def work(number):
        if number == 0:
            with connection.execute_wrapper(stop_before_the_last), pytest.raises(ClaimLost):
                write_gather("default", frozen, how)
            return
        assert enqueued.wait(NEVER)
        Task.objects.filter(pk=frozen.id).update(attempts=2)
        write_gather("default", replace(frozen, attempt=2), left_by(replace(frozen, attempt=2)))
        rescued.set()

    in_threads(work, 2)
    assert Task.objects.filter(task_path__endswith=".child").count() == 3
    assert Step.objects.get().result["children"] == sorted(Waiter.objects.values_list("awaited", flat=True))


def test_a_cancel_that_is_requested_while_a_parent_enqueues_comes_first(claim):
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    result = sample.family.enqueue()
    [asked] = claim()
    how = left_by(asked)
    Task.objects.all().cancel()
    with pytest.raises(TaskCancelled):
        write_gather("default", asked, how)
    assert Task.objects.count() == 1
    assert refreshed(result).status == "RUNNING"


def test_a_session_that_is_lost_while_a_parent_enqueues_costs_no_attempt(monkeypatch):
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    result = sample.family.enqueue()

    def lose(using, *values, **options):
        monkeypatch.undo()
        raise OperationalError("the connection is lost")

    monkeypatch.setattr("django_pglock.store.children.enqueue_many", lose)
    assert outcomes() == ["interrupted", "snoozed", "succeeded", "succeeded"]
    assert refreshed(result).return_value == [["SUCCESSFUL", 10]]
    assert Task.objects.count() == 2


def test_an_answer_to_the_commit_that_is_lost_loses_no_child(monkeypatch):
    """The task is suspended, and its worker does not know it."""
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    result = sample.family.enqueue()

    def lose(using, claim, how):
        monkeypatch.undo()
        write_gather(using, claim, how)
        raise OperationalError("the connection is lost")

    monkeypatch.setattr("django_pglock.worker.child.run.write_gather", lose)
    assert outcomes() == ["lost", "succeeded", "succeeded"]
    assert refreshed(result).return_value == [["SUCCESSFUL", 10]]


@pytest.mark.parametrize("how", ["BEGIN", "autocommit off"])
def test_children_are_enqueued_although_the_function_leaves_a_transaction_open(how):
    """What it has not committed is lost where it is suspended, and committed with the end of its children."""
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    result = sample.family_in_open_transaction.enqueue(how)
    assert outcomes() == ["snoozed", "succeeded", "succeeded"]
    assert refreshed(result).return_value == [["SUCCESSFUL", 10]]
    assert Effect.objects.count() == 1


def test_the_last_progress_of_a_parent_is_written_with_its_children(claim):
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    sample.family.enqueue()
    [claimed] = claim()
    how = left_by(claimed)
    claimed.progress = '{"done": 1, "total": 2}'
    write_gather("default", claimed, how)
    assert Task.objects.get(pk=claimed.id).progress == {"done": 1, "total": 2}


def test_attempts_are_counted_since_the_children_were_enqueued():
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    sample.FAILING.update({"before": 1, "after": 1})
    sample.family_after_a_step.enqueue()
    assert outcomes() == ["retried", "snoozed", "succeeded", "retried", "succeeded"]


# Cancel


def test_the_children_that_have_not_ended_are_cancelled_with_their_parent(parent, claim):
    suspended = parent(*(sample.child.call_of(number) for number in range(4)))
    ended, running = claim(2)
    settle_one(ended, Succeeded())
    other = sample.child.enqueue(9)
    assert Task.objects.filter(pk=suspended.id).cancel() == 1
    states = Task.objects.order_by("pk").values_list("status", flat=True)
    assert list(states) == ["CANCELLED", "SUCCESSFUL", "RUNNING", "CANCELLED", "CANCELLED", "READY"]
    assert Task.objects.get(cancel_requested_at__isnull=False).pk == running.id
    settle_one(running, Succeeded())
    assert status_of(suspended) == "CANCELLED"
    assert refreshed(other).status == "READY"


def test_grandchildren_are_cancelled_too(parent, claim):
    first = parent(sample.family.call_of())
    [second] = claim()
    sample.CHILDREN[:] = [sample.child.call_of(1)]
    write_gather("default", second, left_by(second))
    Task.objects.filter(pk=first.id).cancel()
    assert set(Task.objects.values_list("status", flat=True)) == {"CANCELLED"}


def test_a_parent_is_not_cancelled_without_its_children(parent, monkeypatch):
    """As if the process died between the two."""
    suspended = parent(sample.child.call_of(1))
    with monkeypatch.context() as dying:
        dying.setattr("django_pglock.store.operate.unfinished_gathers", lambda *values: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            Task.objects.filter(pk=suspended.id).cancel()
    assert status_of(suspended) == "BLOCKED"


def test_the_tasks_of_after_ended_are_not_cancelled():
    first = sample.child.enqueue(1)
    last = sample.child.using(after_ended=first).enqueue(2)
    Task.objects.filter(pk=last.id).cancel()
    assert refreshed(first).status == "READY"
    assert Task.objects.get(pk=first.id).status == "READY"


def test_a_cancelled_parent_that_is_retried_sees_its_cancelled_children(parent):
    suspended = parent(sample.child.call_of(1))
    Task.objects.filter(pk=suspended.id).cancel()
    Task.objects.filter(pk=suspended.id).retry()
    assert outcomes() == ["succeeded"]
    assert Task.objects.get(pk=suspended.id).result == [["FAILED", None]]


def test_a_cancelled_parent_that_is_retried_with_its_children_waits_for_them(parent):
    suspended = parent(sample.child.call_of(1))
    Task.objects.filter(pk=suspended.id).cancel()
    assert Task.objects.retry() == 2
    assert outcomes() == ["snoozed", "succeeded", "succeeded"]
    assert Task.objects.get(pk=suspended.id).result == [["SUCCESSFUL", 10]]


# Keys


def begin_order(parent, *calls, order=7):
    return parent(*calls, task=sample.family_of_order, arguments=[order])


def test_a_suspended_parent_keeps_its_lock_key(parent, claim):
    suspended = begin_order(parent, sample.child.call_of(1))
    younger = sample.child_of_order.enqueue(7)
    release("default", [suspended.id])
    assert Task.objects.get(pk=younger.id).status == "BLOCKED"
    assert why_it_waits(Task.objects.get(pk=younger.id), "default").endswith(f"which is held by #{suspended.id}.")
    assert outcomes() == ["succeeded"] * 3
    assert [each.task_path.rpartition(".")[2] for each in Task.objects.order_by("finished_at")] == [
        "child",
        "family_of_order",
        "child_of_order",
    ]


def test_a_suspended_parent_keeps_its_lock_key_before_an_older_task_that_could_not_begin_before_it(parent, claim):
    older = sample.child_of_order.using(run_after=timedelta(hours=1)).enqueue(7)
    begin_order(parent, sample.child.call_of(1))
    Task.objects.filter(pk=older.id).run_now()
    assert Task.objects.get(pk=older.id).status == "BLOCKED"
    assert admit("default", ["order:7"]) == 0
    assert outcomes() == ["succeeded"] * 3


@pytest.mark.parametrize("order", [7, 8])
def test_a_call_with_the_key_of_its_parent_is_refused(claim, order):
    sample.CHILDREN[:] = [sample.child.call_of(1), sample.child_of_order.using(lock="order:7").call_of(order)]
    result = sample.family_of_order.enqueue(7)
    assert outcomes() == ["failed"]
    [error] = refreshed(result).errors
    assert "child_of_order with the lock key 'order:7', which task" in error.traceback
    assert Task.objects.count() == 1


def test_a_call_with_the_key_of_the_parent_of_its_parent_is_refused():
    sample.CHILDREN[:] = [sample.child_of_order.call_of(7)]
    result = sample.grandparent.enqueue()
    assert outcomes() == ["snoozed", "failed", "succeeded"]
    assert refreshed(result).return_value == [["FAILED", None]]


def test_a_suspended_task_does_not_count_at_a_key_of_several():
    """So a function may gather calls of itself, with a limit for all of them."""
    result = sample.family_beside_others.enqueue(7)
    outcomes()
    assert refreshed(result).return_value == 7


def test_a_call_that_would_run_alone_at_the_key_of_its_parent_is_refused():
    calls = [sample.child_of_order.call_of(7)]
    sample.CHILDREN[:] = calls
    result = sample.family_of_order.using(concurrency=2).enqueue(7)
    assert outcomes() == ["failed"]
    assert "StepError" in refreshed(result).errors[0].traceback


def test_a_child_may_take_tokens_of_the_rate_of_its_parent():
    rate = Rate(count=100, per=1, key="api")
    sample.CHILDREN[:] = [sample.child.using(rate=rate).call_of(number) for number in range(3)]
    result = sample.family.using(rate=rate).enqueue()
    outcomes()
    assert len(refreshed(result).return_value) == 3


# Unique children


def test_a_unique_task_that_exists_is_waited_for_and_not_cancelled_with_the_parent(parent):
    there = sample.unique_child.using(priority=-1).enqueue(1)
    suspended = parent(sample.unique_child.call_of(1), sample.unique_child.call_of(2), sample.unique_child.call_of(1))
    first, second, third = Step.objects.get().result["children"]
    assert first == third == int(there.id) != second
    Task.objects.filter(pk=suspended.id).cancel()
    assert Task.objects.get(pk=first).status == "READY"
    assert Task.objects.get(pk=second).status == "CANCELLED"


def test_the_results_of_unique_children_are_in_the_order_of_the_calls():
    sample.CHILDREN[:] = [sample.unique_child.call_of(number) for number in (2, 1, 2)]
    result = sample.family.enqueue()
    outcomes()
    assert [name for _, name in refreshed(result).return_value] == ["child 2", "child 1", "child 2"]


def test_a_unique_task_that_has_ended_before_is_not_waited_for():
    there = sample.child_of_the_hour.enqueue(1)
    assert outcomes() == ["succeeded"]
    sample.CHILDREN[:] = [sample.child_of_the_hour.call_of(1)]
    result = sample.family.enqueue()
    assert outcomes() == ["snoozed", "succeeded"]
    assert refreshed(result).return_value == [["SUCCESSFUL", 1]]
    assert Step.objects.get(name="children").result["children"] == [int(there.id)]


def test_a_task_does_not_wait_for_itself():
    sample.CHILDREN[:] = [sample.child.call_of(1), sample.unique_family.call_of()]
    result = sample.unique_family.enqueue()
    assert outcomes() == ["failed"]
    assert "a call whose unique key is that of task" in refreshed(result).errors[0].traceback
    assert Task.objects.count() == 1


# What is refused


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("gathers in a transaction", "The step 'inside' is called inside of atomic()"),
        ("gathers in a step", "The step 'inner' is called while the step 'outer' runs"),
        ("gathers by a step", "The step 'in' is called while the step 'outer' runs"),
        ("gathers what is enqueued", "Give calls that are not enqueued"),
        ("gathers in a loop", "The step 'inside' is called in the loop 'rows'"),
        ("gathers wrong arguments", "step_tasks.child() missing a required argument: 'number'"),
        ("swallows a gather", "The function has returned after 'outer' has suspended the task"),
    ],
)
def test_a_wrong_use_fails_the_task_and_enqueues_nothing(how, why):
    Effect.objects.create(name="from")
    result = sample.wrong.using(max_attempts=1).enqueue(how)
    assert outcomes()[0] == "failed"
    assert why in refreshed(result).errors[0].traceback
    assert Task.objects.count() == (2 if how == "gathers what is enqueued" else 1)


def test_a_call_of_another_database_is_refused(claim, settings):
    sample.family.enqueue()
    [claimed] = claim()
    steps = steps_of(claimed)
    steps.using = "other"
    with pytest.raises(StepEnded, match="the backend 'default', whose tasks are not in the database 'other'"):
        steps.prepare("children", [sample.child.call_of(1)])


# What people see


def test_a_parent_says_for_how_many_of_its_children_it_waits(parent, claim):
    suspended = parent(*(sample.child.call_of(number) for number in range(9)))
    first, *others = Step.objects.get().result["children"]
    row = Task.objects.get(pk=suspended.id)
    shown = ", ".join(f"#{each}" for each in [first, *others][:5])
    assert why_it_waits(row, "default") == f"This task waits for 9 of 9 tasks to finish: {shown} …"
    for each in claim(6):
        settle_one(each, Succeeded())
    row.refresh_from_db()
    shown = ", ".join(f"#{each}" for each in others[-3:])
    assert why_it_waits(row, "default") == f"This task waits for 3 of 9 tasks to finish: {shown}"
