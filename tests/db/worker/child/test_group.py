"""Groups: the waiting tasks of one group key are run by one call."""

from __future__ import annotations

import psycopg
import pytest
from django.db import OperationalError, connection, transaction

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task
from django_pglock.store.admit import admit
from django_pglock.store.claim import claim_group
from django_pglock.store.outcome import Interrupted, Retried
from django_pglock.store.rescue import interrupted
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.worker.child import attempt as attempts
from django_pglock.worker.child.attempt import Attempt as AttemptUnderTest
from django_pglock.worker.child.executor import include_others
from django_pglock.worker.child.run import run
from django_pglock.worker.child.runners import Runner, Watchdog
from tests.db.worker.conftest import make_feeder
from tests.sample import grouped_tasks as grouped
from tests.sample import keyed_tasks as keyed
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def done(count):
    return Task.objects.filter(status="SUCCESSFUL").count() == count


def test_all_waiting_tasks_of_a_group_are_run_by_one_call(worker, eventually):
    results = [keyed.digest.enqueue(user=1, text=number) for number in range(50)]
    results += [keyed.digest.enqueue(user=2, text="other")]
    worker(threads=4)
    eventually(lambda: done(51))
    assert list(Effect.objects.order_by("-number").values_list("number", flat=True)) == [50, 1]
    assert Effect.objects.get(number=50).name.startswith("0,1,2,3,4,5,"), "in the order in which they came"
    results[7].refresh()
    assert results[7].status == TaskResultStatus.SUCCESSFUL
    assert results[7].return_value == 50


def test_the_parent_knows_the_timeouts_of_all_tasks_of_a_call(worker, eventually, monkeypatch):
    """If it has to kill the process, each of them has exceeded its timeout."""
    child, told = worker(threads=1).child, []
    send = child.channel.send
    monkeypatch.setattr(child.watchdog, "send", lambda **message: told.append(message) or send(**message))
    tasks = [keyed.digest.using(timeout=600).enqueue(user=1, text=number) for number in range(3)]
    eventually(lambda: done(3))
    # One of them may have begun before the others were enqueued.
    ids = [int(each.id) for each in tasks]
    assert sorted(message["began"][0] for message in told if "began" in message) == ids
    assert sorted(message["ended"][0] for message in told if "ended" in message) == ids


def test_a_group_runs_up_to_its_limit_and_after_its_gather_time(worker, eventually):
    worker(threads=4)
    # In one statement, so that all are due at once: tasks whose promotion is still running are not waited for.
    enqueue_many(keyed.gather, [{"user": 1, "text": number} for number in range(7)])
    eventually(lambda: done(7))
    assert sorted(Effect.objects.values_list("number", flat=True)) == [1, 3, 3]
    task = Task.objects.earliest("id")
    assert (task.started_at - task.enqueued_at).total_seconds() >= 0.19


def test_two_workers_never_run_one_group_at_the_same_time(worker, eventually):
    for number in range(10):
        keyed.gather.enqueue(user=1, text=number)
    worker()
    worker()
    eventually(lambda: done(10))
    assert set(Effect.objects.values_list("name", flat=True)) == {"beside 0"}


def test_a_failed_group_call_fails_and_retries_each_member(worker, eventually):
    results = [keyed.fail_together.enqueue(user=1) for _ in range(3)]
    keyed.fail_together.using(max_attempts=1).enqueue(user=1)
    worker()
    eventually(lambda: Task.objects.filter(status="FAILED").count() == 4)
    assert not Effect.objects.filter(name="rolled back").exists()
    results[0].refresh()
    assert [error.exception_class_path for error in results[0].errors] == ["builtins.ValueError"] * 2
    assert Attempt.objects.count() == 7


def test_an_outage_for_a_moment_leaves_no_member_behind(worker, eventually, monkeypatch):
    """The failed attempts of another member cannot be read when the first one claims the group."""
    read, seen, lost = attempts._failures_before, set(), []

    def lose_second_answer(claim, using):
        if seen and claim.id not in seen and not lost:
            lost.append(claim.id)
            raise OperationalError("the connection is lost")
        seen.add(claim.id)
        return read(claim, using)

    monkeypatch.setattr(attempts, "_failures_before", lose_second_answer)
    process = worker(threads=1)
    with transaction.atomic():
        for _ in range(3):
            keyed.fail_together.enqueue(user=1)
    eventually(lambda: Task.objects.filter(status="FAILED").count() == 3)
    eventually(lambda: not process.in_flight.claims)
    assert lost


def test_a_group_that_is_cut_off_runs_again_together_however_often(claim):
    """An outage does not count as a crash by the task. No task fails, also not after MAX_RESCUES cuts."""
    for _ in range(2):
        keyed.digest.enqueue(user=1, text="x")
    Task.objects.update(status="READY")
    first, second = claim(2)
    first.rescues = second.rescues = 3
    attempt = attempts.Attempt(first, "default")
    attempt.include([attempts.Attempt(second, "default")])
    ended = attempt.ended(interrupted(first, OperationalError("cut off")))
    assert isinstance(ended.outcome, Interrupted)
    assert ended.same_call[0].outcome == ended.outcome


def test_a_failure_of_the_function_does_not_cancel_the_others_if_the_first_task_alone_is_cancelled(claim):
    """Before, they ended CANCELLED, although nobody had cancelled them."""
    for _ in range(2):
        keyed.fail_together.enqueue(user=1)
    Task.objects.update(status="READY")
    first, second = claim(2)
    attempt = attempts.Attempt(first, "default")
    attempt.include([attempts.Attempt(second, "default")])
    first.is_cancelled = True
    ended = run(attempt, Runner(Watchdog()))
    assert [type(each.outcome) for each in (ended, *ended.same_call)] == [Retried, Retried]


def test_a_group_with_a_lock_key_runs_after_earlier_and_before_later_tasks(worker, eventually):
    keyed.step.enqueue(1, 1)
    for text in "abc":
        keyed.note.enqueue(order_id=1, author="anna", text=text)
    keyed.step.enqueue(1, 2)
    keyed.note.enqueue(order_id=1, author="anna", text="d")
    worker(threads=4)
    eventually(lambda: done(6))
    names = list(Effect.objects.order_by("id").values_list("name", flat=True))
    assert names == ["begin 1", "end 1", "a,b,c", "begin 1", "end 1", "d"]


def test_a_group_with_a_lock_key_keeps_the_key_until_its_retry(worker, eventually):
    for text in ("fail", "too"):
        keyed.note.enqueue(order_id=1, author="anna", text=text)
    keyed.step.enqueue(1)
    worker(threads=4)
    eventually(lambda: done(3))
    names = list(Effect.objects.order_by("id").values_list("name", flat=True))
    assert names == ["fail,too", "fail,too", "begin 1", "end 1"]


def test_claiming_a_group_holds_no_lock_between_two_messages(claim):
    """A worker that is frozen there would keep the lock until the server ends its session."""
    for number in range(3):
        keyed.digest.enqueue(user=1, text=number)
    held = []
    with connection.cursor() as cursor:
        process = cursor.connection.info.backend_pid

    def look(execute, *statement):
        answer = execute(*statement)
        with psycopg.connect(**connection.get_connection_params(), autocommit=True) as other:
            mine = "SELECT locktype, relation::regclass FROM pg_locks WHERE pid = %s AND locktype <> 'virtualxid'"
            held.append(other.execute(mine, [process]).fetchall())
        return answer

    [first] = claim()
    with connection.execute_wrapper(look):
        assert len(claim_group("default", first, limit=10, gather=0.0)) == 2
        admit("default", [first.lock_key])
    assert held == [[], []]


def test_without_autocommit_runs_are_beside_each_other_as_well(worker, eventually, change_settings):
    change_settings(AUTOCOMMIT=False)
    worker(threads=4)
    enqueue_many(grouped.side_by_side, [{"key": 1}] * 8)
    connection.commit()
    runs = Task.objects.filter(status="RUNNING", concurrency__gt=0)
    eventually(lambda: runs.count() == 3, why="three runs did not begin")
    Effect.objects.create(name="go on")
    connection.commit()
    eventually(lambda: done(8))


@pytest.fixture
def group_in_flight(claim):
    """A feeder that has claimed the first task of a group, and the function that claims the other two."""
    under_test = make_feeder()
    for number in range(3):
        keyed.digest.enqueue(user=1, text=number)
    [first] = claim(worker=under_test.worker)
    under_test.in_flight.add([first])
    attempt = AttemptUnderTest(first, "default")
    return under_test, lambda: include_others(attempt, attempt.definition.group, under_test.in_flight)


def running():
    return Task.objects.filter(status="RUNNING").count()


def test_a_reconnecting_feeder_keeps_a_group_that_a_thread_has_just_claimed(group_in_flight, monkeypatch):
    """Between the claim in the table and its entry in the list of tasks in flight."""
    under_test, claim_others = group_in_flight
    add = under_test.in_flight.add
    monkeypatch.setattr(under_test.in_flight, "add", lambda claims: under_test.connected() or add(claims))
    claim_others()
    assert running() == 3
    monkeypatch.undo()
    under_test.in_flight.claims.clear()
    under_test.connected()
    assert running() == 0, "the thread is through, so from now on they are given back as all others"
