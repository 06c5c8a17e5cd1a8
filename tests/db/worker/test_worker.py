"""A worker in threads of this process: what becomes of tasks."""

from __future__ import annotations

import copy
import logging
import sys
import threading
import time
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models.functions import Now

from django_pglock.conf import get_settings
from django_pglock.models import Attempt as AttemptRow
from django_pglock.models import Task, Worker
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.outcome import Failed, Failure, Released, Succeeded
from django_pglock.store.settle import settle
from django_pglock.tasks.compat import BaseTaskBackend, TaskResultStatus, task_finished, task_started
from django_pglock.worker import Worker as WorkerUnderTest
from django_pglock.worker.capacity import MOST_ASYNC
from django_pglock.worker.claiming import exclusive_run as last_chance
from django_pglock.worker.claiming.fetcher import HOARDING
from django_pglock.worker.claiming.queue_cursor import QueueClaims
from django_pglock.worker.in_flight import Ending, Hand
from django_pglock.worker.running import attempt as execution
from django_pglock.worker.running import executor
from django_pglock.worker.running.attempt import Attempt
from django_pglock.worker.settling import settler
from tests.sample import chaos_tasks, running_tasks, tasks
from tests.sample import keyed_tasks as keyed
from tests.sample.models import Effect, Run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def finished(eventually):
    """Wait until a result is finished and return it as it is then."""

    def wait(result):
        def look():
            result.refresh()
            return result.is_finished

        eventually(look, why=f"task {result.id} never finished")
        return result

    return wait


@pytest.fixture
def gate():
    """Keep ``running_tasks.wait_for_note`` running until the note is there."""
    yield lambda: Effect.objects.create(name="go on")
    Effect.objects.create(name="go on")


@pytest.mark.parametrize("value", [None, 0, "text", [1, {"a": None}], {"ä": 1.5}])
def test_what_a_function_returns_comes_back(worker, finished, value):
    worker()
    result = finished(tasks.echo.enqueue(value))
    assert result.return_value == value
    assert (result.attempts, result.errors) == (1, [])
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at


def test_async_functions_run_side_by_side(worker, finished):
    """Ten sleeps of a second with two threads: in threads they would take five."""
    results = [tasks.sleep_async.enqueue(2.0) for _ in range(10)]
    began = time.monotonic()
    worker(threads=2)
    for result in results:
        assert finished(result).return_value == 2.0
    assert time.monotonic() - began < 9


def test_slow_coroutines_keep_no_thread_idle_and_a_long_function_no_coroutine_waiting(worker, finished, eventually):
    """As many coroutines as there may be wait for ever, and more of them are ready before the others."""
    running = worker(threads=1)
    waiting = [tasks.sleep_async.enqueue(600) for _ in range(MOST_ASYNC + 20)]
    eventually(lambda: running.hand.coroutines.running == MOST_ASYNC)
    assert finished(tasks.echo.enqueue("beside")).return_value == "beside"
    Task.objects.filter(pk__in=[result.id for result in waiting]).cancel()
    eventually(lambda: running.hand.coroutines.running == 0)
    running_tasks.wait_for_note.enqueue("the end")
    eventually(lambda: running.hand.threads.running == 1)
    assert finished(tasks.sleep_async.enqueue(0)).return_value == 0
    running_tasks.note("the end")


@pytest.mark.parametrize(("task", "status"), [(tasks.leave_in_child, "FAILED"), (tasks.stop_its_loop, "SUCCESSFUL")])
def test_no_coroutine_ends_the_loop_of_the_others(worker, finished, eventually, task, status):
    """asyncio ends the loop when SystemExit leaves a coroutine that another one has started."""
    running = worker(threads=1)
    beside = tasks.sleep_async.enqueue(1)
    eventually(lambda: running.hand.coroutines.running == 1)
    assert finished(task.enqueue()).status == status
    assert finished(tasks.sleep_async.enqueue(0)).return_value == 0
    assert finished(beside).return_value == 1
    eventually(lambda: running.hand.coroutines.running == 0)
    assert running.health.stuck() is None
    assert running.shutdown() is True


def test_the_context_knows_attempt_and_result(worker, finished):
    worker()
    result = tasks.tell_context.enqueue("hello")
    assert finished(result).return_value == [1, result.id, "hello"]


def test_context_variables_do_not_leak_from_task_to_task(worker, finished):
    """Of a tenant, a language, a decimal context, a span. Connections and caches stay the thread's."""

    def hear(**kwargs):
        tasks.tenant.set(tasks.tenant.get() + " heard")

    results = [
        task.enqueue(*arguments)
        for task, *arguments in [
            (tasks.connection_pid,),
            (tasks.tell_tenant,),
            (tasks.set_tenant, "first"),
            (tasks.tell_tenant,),
            (tasks.tell_tenant_in_coroutine,),
            (tasks.connection_pid,),
        ]
    ]
    task_started.connect(hear)
    try:
        worker(threads=1)
        values = [finished(result).return_value for result in results]
    finally:
        task_started.disconnect(hear)
    before, after = values[1], values[3]
    assert before[0] == "nobody heard", "what is set for a task when it starts is there for it"
    assert before == after
    assert values[4] == before[:2]
    assert values[0] == values[5]


def test_a_failure_is_recorded_with_its_traceback(worker, finished):
    worker()
    result = finished(tasks.fail.enqueue("boom"))
    assert result.status == TaskResultStatus.FAILED
    [error] = result.errors
    assert error.exception_class is ValueError
    assert "ValueError: boom" in error.traceback


def test_retries_end_with_success_or_with_the_last_attempt(worker, finished):
    worker()
    result = finished(tasks.fail_twice.enqueue("a"))
    assert (result.return_value, result.attempts, len(result.errors)) == ("at last", 3, 2)
    assert finished(tasks.fail_with_function.enqueue()).attempts == 2
    assert finished(tasks.fail_with_broken_function.using(max_attempts=1).enqueue()).attempts == 1
    assert finished(tasks.fail_with_function_that_exits.enqueue()).attempts == 2


def test_exceptions_that_are_not_to_be_retried_are_not(worker, finished):
    worker()
    assert finished(tasks.fail_for_good.enqueue()).attempts == 1


def test_a_retry_waits_its_back_off(worker, eventually):
    worker()
    tasks.fail_with_long_wait.enqueue()
    row = eventually(lambda: Task.objects.filter(status="SCHEDULED").first())
    assert timedelta(minutes=59) < row.run_after - row.enqueued_at < timedelta(minutes=61)


@pytest.mark.parametrize(
    ("task", "path"),
    [
        (tasks.raise_nul, "builtins.ValueError"),
        (tasks.raise_unprintable, "tests.sample.tasks.raise_unprintable.<locals>.Unprintable"),
        (tasks.return_unstorable, "django_pglock.errors.TaskResultError"),
        (tasks.leave, "builtins.SystemExit"),
        (tasks.cancel_itself, "asyncio.exceptions.CancelledError"),
        (tasks.break_connection, "django.db.utils.DataError"),
        (tasks.raise_nonsense, "builtins.TypeError"),
        (tasks.raise_ring, "builtins.KeyError"),
        (tasks.raise_ring_in_coroutine, "builtins.KeyError"),
    ],
)
def test_no_ending_is_so_odd_that_it_gets_lost(worker, finished, caplog, task, path):
    """Peers crash on a NUL in a message and leave the task running for ever."""
    # Django's own log has the exception as it is, and pytest cannot send each character from process to process.
    caplog.set_level(logging.CRITICAL, logger=BaseTaskBackend.__module__.partition(".backends")[0])
    worker(threads=1)
    result = finished(task.enqueue())
    assert [error.exception_class_path for error in result.errors] == [path]
    assert finished(tasks.echo.enqueue("still here")).return_value == "still here"


@pytest.mark.parametrize("kind", ["autocommit", "atomic", "closed"])
def test_a_transaction_that_is_left_open_is_not_the_next_tasks(worker, finished, caplog, kind):
    """Else what all the others write until somebody looks at the connection would be rolled back with it."""
    tasks.leave_transaction_open.enqueue(kind)
    results = [tasks.record.enqueue("committed", number) for number in range(5)]
    worker(threads=1)
    for result in results:
        assert finished(result).status == TaskResultStatus.SUCCESSFUL
    assert list(Effect.objects.order_by("id").values_list("name", "number")) == [("committed", n) for n in range(5)]
    assert sum("left a transaction open" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("task", [tasks.nothing, tasks.sleep_async])
def test_what_goes_wrong_around_a_function_fails_its_task_and_nothing_else(
    worker, finished, eventually, monkeypatch, task
):
    """A thread, or a coroutine, that ended without an outcome would leave the task running, kept alive by the pulse."""
    running = worker(threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "ending", lambda *args, **kwargs: sys.exit("a mistake of ours"))
        result = finished(task.enqueue(0))
    assert [error.exception_class_path for error in result.errors] == ["builtins.SystemExit"]
    assert finished(tasks.echo.enqueue("still here")).return_value == "still here"
    eventually(lambda: (running.hand.coroutines.running, running.hand.claims) == (0, {}))


def test_a_function_that_is_called_wrongly_fails_by_itself(worker, finished):
    worker()
    result = finished(tasks.echo.enqueue("one", "too many"))
    assert result.errors[0].exception_class is TypeError


def test_arguments_that_somebody_else_wrote_into_the_table_harm_nobody(worker, eventually):
    worker(threads=1)
    row = Task.objects.create(
        queue="default", backend="default", task_path="tests.sample.tasks.echo", args={"not": "a list"}
    )
    eventually(lambda: Task.objects.filter(pk=row.pk, status="FAILED").exists())


def test_higher_priorities_run_first(worker, finished):
    for number, priority in enumerate((0, 10, -10, 10)):
        result = tasks.record.using(priority=priority).enqueue("order", number)
    worker(threads=1)
    finished(result)
    # The last ones may still be to come, also between two looks.
    found = [effect.number for effect in Effect.objects.order_by("id")]
    assert len(found) >= 2
    assert found == [1, 3, 0, 2][: len(found)]


def test_a_worker_serves_the_queues_it_is_told_to(worker, finished):
    other = tasks.nothing.using(queue_name="other").enqueue()
    worker(queues=["default", "mail"])
    finished(tasks.nothing.using(queue_name="mail").enqueue())
    other.refresh()
    assert other.status == TaskResultStatus.READY


def test_a_worker_without_queues_serves_all(worker, finished):
    results = [tasks.nothing.using(queue_name=name).enqueue() for name in ("a", "b", "a", "c")]
    worker()
    for result in results:
        finished(result)


def test_a_task_for_later_is_not_late(worker, finished, settings):
    """Without the alarm it would be a minute late."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 70.0, "HEARTBEAT_LIMIT": 210.0, "POLL_INTERVAL": 600.0}
    worker()
    result = finished(tasks.nothing.using(run_after=timedelta(seconds=0.5)).enqueue())
    row = Task.objects.get(pk=result.id)
    assert timedelta(0) <= row.last_attempted_at - row.run_after < timedelta(seconds=10)


def test_atomic_effects_and_completion_are_one(worker, finished):
    worker()
    assert finished(tasks.record_atomically.enqueue("once")).status == TaskResultStatus.SUCCESSFUL
    assert finished(tasks.write_and_fail.enqueue("never")).status == TaskResultStatus.FAILED
    assert finished(tasks.record.using(atomic=True).enqueue("by call")).status == TaskResultStatus.SUCCESSFUL
    assert set(Effect.objects.values_list("name", flat=True)) == {"once", "by call"}


def test_a_hook_that_fails_after_the_commit_is_logged_and_the_task_has_succeeded(worker, finished, eventually, caplog):
    """What is committed is committed. It was taken for a task that somebody else has."""
    running = worker()
    assert finished(tasks.fail_after_commit.enqueue("kept")).status == TaskResultStatus.SUCCESSFUL
    eventually(lambda: not running.hand.claims)
    assert Effect.objects.get().name == "kept"
    [record] = [record for record in caplog.records if "on_commit hook" in record.message]
    assert record.exc_info[0] is ZeroDivisionError
    assert "was lost" not in caplog.text


def test_an_atomic_task_that_lost_its_claim_leaves_no_effect(worker, eventually, gate):
    """Taken away while it runs: it finds out at its last statement, and everything rolls back."""
    running = worker()
    task = running_tasks.wait_for_note.using(atomic=True).enqueue("go on")
    eventually(lambda: Task.objects.filter(pk=task.id, status="RUNNING").exists())
    assert Task.objects.filter(pk=task.id).update(status="CANCELLED", finished_at=Now()) == 1
    gate()
    eventually(lambda: running.settler.counts[None] == 1, why="the claim was not lost")
    assert not Effect.objects.filter(name="waits").exists()
    assert Task.objects.get(pk=task.id).status == "CANCELLED"


@pytest.mark.parametrize("task", [tasks.record_atomically, tasks.record])
def test_a_thread_that_cannot_connect_does_not_claim_and_give_back_without_end(worker, eventually, monkeypatch, task):
    """As when a role's connections are used up: the parts of the worker have theirs, its threads have none."""
    monkeypatch.setattr(executor, "BETWEEN_TRIES", 0.3)
    result = task.enqueue("x")
    Task.objects.update(attempts=1)  # what was tried before is read before it begins
    with monkeypatch.context() as patch:
        for name in ("connection_for", "_failures_before"):
            patch.setattr(execution, name, refuse)
        worker(threads=1)
        eventually(lambda: Task.objects.get(pk=result.id).attempts > 1)
        before = Task.objects.get(pk=result.id).attempts
        time.sleep(1)
        assert Task.objects.get(pk=result.id).attempts - before <= 4
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists())


def refuse(*args, **kwargs):
    raise OperationalError("not yet")


def test_signals_name_the_backends_class_and_a_bad_receiver_harms_nobody(worker, finished, eventually):
    """A peer turns a success into a failure when a receiver raises."""
    heard = []

    def hear(sender, task_result, **kwargs):
        heard.append((sender.__name__, task_result.id, task_result.status))
        raise RuntimeError("a receiver with a bug")

    task_started.connect(hear)
    task_finished.connect(hear)
    try:
        worker()
        result = finished(tasks.echo.enqueue(1))
        eventually(lambda: len(heard) == 2)
    finally:
        task_started.disconnect(hear)
        task_finished.disconnect(hear)
    assert heard == [
        ("PostgresBackend", result.id, TaskResultStatus.RUNNING),
        ("PostgresBackend", result.id, TaskResultStatus.SUCCESSFUL),
    ]


def test_a_receiver_that_exits_ends_neither_a_thread_nor_the_settler(worker, finished, caplog):
    """Of an exception that is no ``Exception``, Django's own ``send_robust()`` protects nobody."""

    def leave(**kwargs):
        sys.exit("a receiver that calls sys.exit()")

    running = worker(threads=1)
    task_started.connect(leave)
    task_finished.connect(leave)
    try:
        assert finished(tasks.echo.enqueue(1)).return_value == 1
        assert finished(tasks.echo.enqueue(2)).return_value == 2
    finally:
        task_started.disconnect(leave)
        task_finished.disconnect(leave)
    assert "a receiver that calls sys.exit()" in caplog.text
    assert running.health.stuck() is None


def test_an_idle_worker_is_woken_by_the_commit_and_not_before(worker, eventually, settings):
    """Without the notification it would sleep for ten minutes."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    time.sleep(0.3)
    with transaction.atomic():
        result = tasks.nothing.enqueue()
        time.sleep(0.2)
        assert Task.objects.get(pk=result.id).status == "READY"
    eventually(lambda: Task.objects.filter(pk=result.id, status="SUCCESSFUL").exists(), why="it was not woken")


def test_a_worker_whose_row_was_removed_is_woken_again_soon(worker, eventually):
    """As when it was frozen for too long. The next beat writes the row anew; without the flag, each task is polled."""
    sleeps = Worker.objects.filter(is_sleeping=True)
    worker()
    eventually(sleeps.exists)
    Worker.objects.all().delete()
    eventually(sleeps.exists, why="it does not ask for news any more")


def test_a_worker_that_may_not_listen_polls(worker, finished):
    worker(listens=False)
    finished(tasks.nothing.enqueue())


def test_a_worker_leaves_no_trace_when_it_stops(worker):
    running = worker()
    assert Worker.objects.count() == 1
    assert running.shutdown() is True
    assert running.shutdown() is True, "twice does no harm"
    assert Worker.objects.count() == 0
    assert running.hand.claims == {}
    assert AttemptRow.objects.count() == 0


def test_what_has_not_begun_is_given_back_at_the_end(worker, eventually):
    """One thread, one long task: the others were at most claimed, and are free again at once."""
    running = worker(threads=1, grace=10)
    for _ in range(50):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 50)
    tasks.note_and_sleep.enqueue("long", 0.5)
    for _ in range(20):
        tasks.record.enqueue("after")
    eventually(lambda: Effect.objects.filter(name="long").exists())
    assert running.shutdown() is True
    assert not Task.objects.filter(status="RUNNING").exists()
    assert Task.objects.filter(task_path__endswith="note_and_sleep", status="SUCCESSFUL").exists()


def test_what_outlasts_the_grace_is_given_back(worker, eventually, gate):
    running = worker(threads=1, grace=0.2)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    assert running.shutdown() is False
    row = Task.objects.get()
    assert (row.status, row.retries, row.rescues) == ("SCHEDULED", 0, 0)
    assert row.run_after > row.last_attempted_at, "not while the process may still be at it"


def test_a_task_on_its_last_chance_runs_alone(worker, eventually):
    """It may be the one that takes workers down; those beside it must not go down with it again."""
    suspects = [int(chaos_tasks.work.enqueue(0.1).id) for _ in range(2)]
    Task.objects.update(rescues=get_settings().MAX_RESCUES)
    others = [int(chaos_tasks.work.enqueue(0.1).id) for _ in range(6)]
    worker(threads=4)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == len(suspects + others))
    runs = list(Run.objects.order_by("started_at"))
    assert len(runs) == len(suspects + others), "nothing ran twice"
    for suspect in Run.objects.filter(task__in=suspects):
        beside = [run for run in runs if run.started_at < suspect.ended_at and run.ended_at > suspect.started_at]
        assert [run.pk for run in beside] == [suspect.pk]


def test_a_last_chance_does_not_keep_idle_threads_waiting_for_long(worker, eventually, monkeypatch, caplog, gate):
    """A neighbour runs for hours: the suspects are put off, the others go on, and each suspect is alone at last."""
    monkeypatch.setattr(last_chance, "PATIENCE", 0.5)
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=3)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspects = [int(chaos_tasks.work.enqueue(0.05).id) for _ in range(3)]
        Task.objects.filter(pk__in=suspects).update(rescues=get_settings().MAX_RESCUES)
        others = [int(chaos_tasks.work.enqueue(0.01).id) for _ in range(10)]
    eventually(lambda: Task.objects.filter(pk__in=others, status="SUCCESSFUL").count() == 10, why="they wait")
    eventually(lambda: Task.objects.filter(pk__in=suspects, status="SCHEDULED").count() == 3, why="not put off")
    assert not Run.objects.filter(task__in=suspects).exists(), "it was not alone"
    assert sum("was not alone" in message for message in caplog.messages) == 1, "each of them made the others wait"
    claims = sum(Task.objects.filter(pk__in=suspects).values_list("attempts", flat=True))
    assert claims <= 10, "claimed and given back again and again"
    assert running.fetcher._last_chance._patience == 1.0

    gate()
    eventually(lambda: Task.objects.filter(pk__in=suspects, status="SUCCESSFUL").count() == 3, seconds=30)
    assert set(Task.objects.filter(pk__in=suspects).values_list("rescues", "retries")) == {(3, 0)}
    runs = list(Run.objects.all())
    for suspect in Run.objects.filter(task__in=suspects):
        beside = [run for run in runs if run.started_at < suspect.ended_at and run.ended_at > suspect.started_at]
        assert [run.pk for run in beside] == [suspect.pk]
    assert running.fetcher._last_chance._patience == 0.5, "the next one begins anew"


def test_a_worker_that_drains_puts_no_last_chance_off(worker, eventually, monkeypatch, gate):
    """It would end without it."""
    monkeypatch.setattr(last_chance, "PATIENCE", 0.05)
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=2, drain=True)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspect = int(chaos_tasks.work.enqueue(0).id)
        Task.objects.filter(pk=suspect).update(rescues=get_settings().MAX_RESCUES)
    eventually(lambda: Task.objects.filter(pk=suspect, status="RUNNING").exists())
    time.sleep(0.3)
    assert Task.objects.get(pk=suspect).status == "RUNNING"
    gate()
    assert running._asked_to_stop.wait(15)
    assert running.shutdown() is True
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


def test_a_worker_that_ends_gives_back_what_waits_to_be_alone(worker, eventually, gate):
    running_tasks.wait_for_note.enqueue("go on")
    running = worker(threads=2, grace=60)
    eventually(lambda: Effect.objects.filter(name="waits").exists())
    with transaction.atomic():
        suspect = int(chaos_tasks.work.enqueue(0).id)
        Task.objects.filter(pk=suspect).update(rescues=get_settings().MAX_RESCUES)
    eventually(lambda: Task.objects.filter(pk=suspect, status="RUNNING").exists())
    ended = []
    ending = threading.Thread(target=lambda: ended.append(running.shutdown()))
    ending.start()
    eventually(lambda: Task.objects.filter(pk=suspect, status="READY").exists(), why="it was not given back")
    gate()
    ending.join(20)
    assert ended == [True]
    row = Task.objects.get(pk=suspect)
    assert (row.status, row.rescues) == ("READY", get_settings().MAX_RESCUES)


def test_claims_that_only_wait_are_given_to_somebody_who_is_idle(worker, eventually):
    """The first worker has learnt that tasks are quick and claims ahead; then a long one blocks its only thread."""
    worker(threads=1, grace=0)
    for _ in range(300):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 300)
    with transaction.atomic():
        tasks.note_and_sleep.enqueue("long", 10)
        for number in range(30):
            tasks.record.enqueue("quick", number)
    eventually(lambda: Effect.objects.filter(name="long").exists())
    worker(threads=1)
    eventually(lambda: Effect.objects.filter(name="quick").count() == 30, seconds=8, why="they were hoarded")
    running = Task.objects.filter(status="RUNNING").values_list("task_path", flat=True)
    eventually(lambda: list(running.all()) == ["tests.sample.tasks.note_and_sleep"], why="the long one still runs")
    assert set(Effect.objects.filter(name="quick").values_list("number", flat=True)) == set(range(30))


def test_a_task_that_was_given_back_and_claimed_again_stays_in_hand():
    """Letting go of the old claim must not take the new one along: the pulse would no longer vouch for it."""
    # No worker runs here: its upkeep would rescue claims whose workers do not exist.
    hand = Hand(threads=1)
    [old], [new] = list(_claims_of_one_task())
    hand.claims[old.id, old.attempt] = old
    hand.claims[new.id, new.attempt] = new
    hand.let_go([Ending(old, Released())])
    assert hand.task_ids() == [new.id]
    hand.let_go([Ending(new, Released())])


def _claims_of_one_task():
    row = Task.objects.create(queue="elsewhere", backend="default", task_path="nobody.knows")
    for _ in range(2):
        worker = uuid4()
        taken = claim_statement("default", worker=worker, paths=["nobody.knows"]).execute(1, "elsewhere")
        claims = claims_of(taken, worker)
        yield claims
        settle("default", [(claims[0], Released())], worker)
    assert row.pk == claims[0].id


def test_a_worker_that_waits_for_its_database_can_be_stopped(monkeypatch):
    monkeypatch.setattr("django_pglock.worker.service.dedicated_connection", refuse)
    worker = WorkerUnderTest(threads=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    time.sleep(0.3)
    worker.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def in_hand(worker, claim, eventually):
    """Start a worker that has so many claims in hand, but runs nothing."""

    def start(count):
        running = worker(queues=["another"])
        # Before, it gives back what it does not know of.
        eventually(lambda: running.fetcher.is_claiming)
        for _ in range(count):
            tasks.nothing.enqueue()
        # By this very worker: its upkeep would rescue the claims of one that does not exist.
        claims = claim(count, worker=running.identity.id)
        for each in claims:
            running.hand.claims[each.id, each.attempt] = each
        return running, claims

    return start


@pytest.mark.parametrize(
    ("text", "error"), [("{no json", "DataError"), ("[" * 10**5 + "]" * 10**5, "OperationalError")]
)
def test_an_outcome_that_the_database_refuses_fails_alone(in_hand, eventually, text, error):
    """One row that cannot be stored must not hold up its batch, nor lose its own outcome."""
    running, claims = in_hand(9)
    refused = claims[4]
    for each in claims:
        running.hand.outbox.put(Ending(each, Succeeded(text if each is refused else "1")))
    eventually(lambda: not running.hand.claims)
    assert set(Task.objects.exclude(pk=refused.id).values_list("status", flat=True)) == {"SUCCESSFUL"}
    row = Task.objects.get(pk=refused.id)
    assert row.status == "FAILED"
    assert row.failures.get().exception_path == f"django.db.utils.{error}"
    assert running.settler.reconnects == 0


def test_large_results_are_written_a_few_at_a_time(in_hand, eventually, monkeypatch):
    monkeypatch.setattr("django_pglock.worker.settling.settler.LARGEST_TEXT", 200)
    settle, sizes = settler.settle, []
    monkeypatch.setattr(settler, "settle", lambda *args: (sizes.append(len(args[1])), settle(*args))[1])
    running, claims = in_hand(9)
    for each in claims:
        running.hand.outbox.put(Ending(each, Succeeded(f'"{"x" * 90}"')))
    eventually(lambda: not running.hand.claims)
    assert (max(sizes), sum(sizes)) == (2, 9)
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


FAILED = Failed(Failure("builtins.ValueError", "Traceback …"))


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("outcome", [Succeeded(), FAILED], ids=["success", "failure"])
def test_a_row_that_somebody_has_locked_holds_up_no_other(in_hand, eventually, locked, outcome, tells):
    """As by a cancel in a long transaction. What the task tells last comes with its end."""
    running, claims = in_hand(6)
    held, *others = claims
    held.progress = '{"done": 9}' if tells else None
    with locked(held.id):
        for each in claims:
            running.hand.outbox.put(Ending(each, FAILED if each is claims[5] else outcome))
        eventually(lambda: list(running.hand.claims.values()) == [held], seconds=5)
        assert not Task.objects.filter(pk__in=[each.id for each in others], status="RUNNING").exists()
        # To give it up when the worker ends comes too late: it has ended.
        running.hand.abandon([held], 60)
        time.sleep(0.3)
        assert running.hand.unsettled == 1, "what is held waits for nothing else"
        assert Task.objects.get(pk=held.id).status == "RUNNING"
    eventually(lambda: not running.hand.claims, seconds=5)
    row = Task.objects.get(pk=held.id)
    assert (row.status, row.progress) == (outcome.status, {"done": 9} if tells else None)
    assert (running.settler.reconnects, running.settler.counts[None]) == (0, 0)


def test_a_claim_that_is_lost_while_its_row_is_locked_is_lost(in_hand, eventually, in_threads):
    running, [mine] = in_hand(1)

    def take_away(_):
        with transaction.atomic():
            Task.objects.filter(pk=mine.id).update(attempts=mine.attempt + 1)
            running.hand.outbox.put(Ending(mine, Succeeded()))
            eventually(lambda: running.settler._held, seconds=5)

    in_threads(take_away, 1)
    eventually(lambda: not running.hand.claims, seconds=5)
    assert running.settler.counts[None] == 1
    assert Task.objects.get().status == "RUNNING"


def test_an_outcome_that_is_refused_takes_no_success_along(in_hand, eventually):
    """What was settled before it, by the other statement of the same batch, is not lost."""
    running, claims = in_hand(2)
    for each, outcome in zip(claims, (Succeeded(), Failed(Failure("x", "no text\0"))), strict=True):
        running.hand.outbox.put(Ending(each, outcome))
    eventually(lambda: not running.hand.claims)
    assert (running.settler.counts[Succeeded], running.settler.counts[None]) == (1, 1)


def test_a_worker_that_ends_says_what_is_still_locked(in_hand, eventually, locked, caplog, monkeypatch):
    monkeypatch.setattr("django_pglock.worker.worker.LAST_WRITES", 0.5)
    running, [mine] = in_hand(1)
    with locked(mine.id):
        running.hand.outbox.put(Ending(mine, Succeeded()))
        eventually(lambda: running.settler._held, seconds=5)
        running.shutdown()
    assert f"task {mine.id} ({mine.task_path}) attempt 1> has ended, but somebody has locked its row" in caplog.text


def test_claims_that_were_long_on_their_way_are_run(worker, finished, monkeypatch):
    """They have not waited for a thread yet, so they are not given back for having waited."""
    claim = QueueClaims.claim

    def claim_slowly(self, limit):
        claims = claim(self, limit)
        time.sleep(HOARDING * 1.2)
        return claims

    monkeypatch.setattr(QueueClaims, "claim", claim_slowly)
    worker()
    result = finished(tasks.nothing.enqueue())
    assert result.status == TaskResultStatus.SUCCESSFUL
    assert Task.objects.get().attempts == 1


@pytest.fixture
def change_settings():
    """Change settings of the connections that other threads make from now on."""
    settings, own = connections.settings["default"], connection.settings_dict
    before = copy.deepcopy(settings)
    connection.settings_dict = before
    yield settings.update
    connection.settings_dict = own
    connection.close_pool()
    settings.update(before)


def test_without_autocommit_a_worker_commits_what_it_writes_and_nothing_else(change_settings, worker, finished):
    """A function then ends its transactions itself; what it leaves is not committed with somebody else's."""
    with transaction.atomic():
        results = [tasks.record.enqueue("left open"), tasks.fail.enqueue(), tasks.record_atomically.enqueue("atomic")]
        results += [keyed.digest.enqueue(user=1, text="in a group") for _ in range(3)]
    change_settings(AUTOCOMMIT=False)
    worker(threads=1)
    for result in results:
        assert finished(result).attempts == 1
    assert [result.status.value for result in results] == ["SUCCESSFUL", "FAILED", *["SUCCESSFUL"] * 4]
    assert [result.return_value for result in results[3:]] == [3, 3, 3], "the claims of the group were rolled back"
    assert list(Effect.objects.values_list("name", flat=True)) == ["atomic"]


def test_a_pool_with_fewer_connections_than_there_are_threads_is_enough(change_settings, worker, finished):
    """Threads without a task would keep what those with one wait for."""
    pool = {"min_size": 1, "max_size": 1, "timeout": 3.0}
    change_settings(CONN_MAX_AGE=0, OPTIONS={**connection.settings_dict["OPTIONS"], "pool": pool})
    worker(threads=4)
    for result in [tasks.record.enqueue("a") for _ in range(12)]:
        assert finished(result).status == TaskResultStatus.SUCCESSFUL
