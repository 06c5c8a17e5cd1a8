"""``run_tasks()``: tasks run in the thread of a test, also in the transaction of a ``TestCase``."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from uuid import uuid4

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, connection, transaction
from django.test import TestCase, TransactionTestCase
from django.utils import timezone

from django_pglock import Cancel, Group, Rate, Retry, Snooze, task
from django_pglock.errors import ConfigurationError, TaskTimeout
from django_pglock.models import Number, Queue, RateLimit, Task, Worker
from django_pglock.tasks.compat import task_finished, task_started
from django_pglock.testing import run_tasks
from django_pglock.worker import Worker as RealWorker
from django_pglock.worker.child import logs
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.usefixtures("own_registry")
HOUR = timedelta(hours=1)


CASES = [
    pytest.param(None, marks=pytest.mark.django_db, id="TestCase"),
    pytest.param(None, marks=pytest.mark.django_db(transaction=True), id="TransactionTestCase"),
]


@pytest.fixture(params=CASES)
def each_case(request):
    """The test is in a transaction that is rolled back, as in a TestCase, and then outside of one."""


both = pytest.mark.usefixtures("each_case")


@task
def write(number=0):
    Effect.objects.create(name="run", number=number)
    return number


def local(**options):
    """Decorate a function of a test as if it stood in a module, as functions of tasks must."""

    def decorate(function):
        function.__qualname__ = function.__name__
        return task(**options)(function)

    return decorate


def numbers():
    return list(Effect.objects.order_by("id").values_list("number", flat=True))


def raising(*errors, **options):
    """Return a task that raises these errors, one at each call, and then returns."""
    left = list(errors)

    @local(**options)
    def raises():
        if left:
            raise left.pop(0)

    return raises


def outcomes(runs):
    return [each.outcome for each in runs]


class WithTestCase(TestCase):
    def test_it_runs_in_the_transaction_of_the_test(self):
        write.enqueue(1)
        [ran] = run_tasks()
        self.assertEqual((ran.outcome, ran.attempt, ran.exception, ran.result.return_value), ("succeeded", 1, None, 1))
        self.assertEqual(numbers(), [1])
        self.assertTrue(connection.in_atomic_block)

    def test_nothing_is_left_of_the_test_before(self):
        self.test_it_runs_in_the_transaction_of_the_test()

    def test_hooks_that_wait_in_a_block_of_the_test_run_once(self):
        ran = []
        transaction.on_commit(lambda: ran.append("before"))
        with self.captureOnCommitCallbacks(execute=True) as hooks:
            transaction.on_commit(lambda: ran.append("inside"))
            run_tasks()
            self.assertEqual(ran, ["before", "inside"])
            transaction.on_commit(lambda: ran.append("after"))
        self.assertEqual(ran, ["before", "inside", "after"])
        self.assertEqual(len(hooks), 2)


class WithDataOfTheClass(TestCase):
    @classmethod
    def setUpTestData(cls):
        with transaction.atomic():
            cls.keyed = task(lock="a")(write.func)
            cls.keyed.enqueue(1)
        transaction.on_commit(lambda: write.enqueue(2))

    def test_its_hooks_run_once(self):
        self.assertEqual(len(run_tasks()), 2)
        self.assertEqual(run_tasks(), [])
        self.assertEqual(numbers(), [1, 2])

    def test_they_run_in_each_test(self):
        self.test_its_hooks_run_once()


class WithTransactionTestCase(TransactionTestCase):
    def test_each_statement_is_committed(self):
        result = write.enqueue(1)
        self.assertEqual(outcomes(run_tasks()), ["succeeded"])
        result.refresh()
        self.assertEqual(result.return_value, 1)
        self.assertFalse(connection.in_atomic_block)


@both
def test_tasks_run_by_priority_and_then_as_enqueued():
    for number, priority in enumerate([0, 5, 0, 9]):
        write.using(priority=priority).enqueue(number)
    run_tasks()
    assert numbers() == [3, 1, 0, 2]


@both
def test_a_task_that_a_task_enqueues_is_next_if_its_priority_is_higher():
    @local()
    def enqueue_others():
        write.using(priority=9).enqueue(9)

    enqueue_others.enqueue()
    write.enqueue(1)
    run_tasks()
    assert numbers() == [9, 1]


@both
def test_only_tasks_of_the_queue_run():
    write.using(queue_name="mail").enqueue(1)
    write.using(queue_name="reports").enqueue(2)
    assert [each.result.return_value for each in run_tasks("mail")] == [1]
    assert [each.result.return_value for each in run_tasks("rep*")] == [2]
    write.using(queue_name="mail", run_after=HOUR).enqueue(3)
    assert run_tasks(["reports"]) == []


@both
def test_a_paused_queue_keeps_its_tasks_and_their_dates():
    Queue.objects.pause("default")
    write.enqueue()
    write.using(run_after=HOUR).enqueue()
    assert run_tasks() == []
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == ["READY", "SCHEDULED"]


@both
def test_scheduled_tasks_and_retries_run_in_the_order_of_their_dates():
    calls = []

    @local(max_attempts=2, backoff=2 * 3600)
    def fails():
        calls.append("fails")
        raise ConnectionError("down")

    @local()
    def later(hours):
        calls.append(hours)

    fails.enqueue()
    for hours in (3, 1):
        later.using(run_after=hours * HOUR).enqueue(hours)
    runs = run_tasks()
    assert calls == ["fails", 1, "fails", 3]
    assert outcomes(runs) == ["retried", "succeeded", "failed", "succeeded"]
    assert [each.attempt for each in runs] == [1, 1, 2, 1]
    assert len(runs[0].result.errors) == 2
    assert isinstance(runs[2].exception, ConnectionError)


@both
def test_with_due_nothing_runs_before_its_date():
    @local(max_attempts=2, backoff=3600)
    def fails():
        raise ConnectionError("down")

    fails.enqueue()
    write.using(run_after=HOUR).enqueue()
    assert outcomes(run_tasks(until="due")) == ["retried"]
    assert set(Task.objects.values_list("status", flat=True)) == {"SCHEDULED"}
    assert run_tasks(until="due") == []
    Task.objects.update(run_after="2020-01-01T00:00Z")
    assert sorted(outcomes(run_tasks(until="due"))) == ["failed", "succeeded"]


@both
def test_a_failed_attempt_is_raised_if_asked():
    error = ValueError("broken")
    raising(error, ValueError("again"), max_attempts=2).enqueue()
    with pytest.raises(ValueError, match="broken") as caught:
        run_tasks(raise_errors=True)
    assert caught.value is error
    assert Task.objects.get().status == "SCHEDULED", "the outcome is written before"
    assert outcomes(run_tasks()) == ["failed"]


@both
def test_a_function_that_says_how_its_task_continues_has_not_failed():
    raising(Retry(after=60), Snooze(60), Cancel("enough"), max_attempts=2).enqueue()
    assert outcomes(run_tasks(raise_errors=True)) == ["retried", "snoozed", "cancelled"]


@both
def test_ctrl_c_ends_the_run_and_is_recorded():
    raising(KeyboardInterrupt()).enqueue()
    write.enqueue()
    with pytest.raises(KeyboardInterrupt):
        run_tasks()
    assert Task.objects.order_by("id").first().status == "FAILED"
    assert numbers() == []


@both
def test_a_task_that_snoozes_without_end_is_an_error_that_says_so():
    @local()
    def snooze():
        raise Snooze(3600)

    snooze.enqueue()
    with pytest.raises(RuntimeError, match=r"has run 5 attempts, and Task .*snooze.* would follow"):
        run_tasks(limit=5)
    assert Task.objects.get().status in ("READY", "SCHEDULED")
    assert outcomes(run_tasks(until="due")) == ["snoozed"]


@both
def test_a_task_that_breaks_its_transaction_breaks_neither_the_test_nor_other_tasks():
    @local()
    def breaks():
        Effect.objects.create(pk=1, name="run", number=1)
        Effect.objects.create(pk=1, name="run", number=2)

    breaks.enqueue()
    write.enqueue(3)
    runs = run_tasks()
    assert outcomes(runs) == ["failed", "succeeded"]
    assert isinstance(runs[0].exception, IntegrityError)
    assert numbers()[-1] == 3


@both
def test_an_atomic_task_and_its_outcome_are_one():
    @local(atomic=True)
    def atomic(is_broken):
        write.func(1)
        if is_broken:
            connection.cursor().execute("SELECT 1/0")

    atomic.enqueue(False)
    atomic.enqueue(True)
    assert outcomes(run_tasks()) == ["succeeded", "failed"]
    assert numbers() == [1]


@both
@pytest.mark.parametrize(("is_atomic", "outcome", "kept"), [(True, "failed", []), (False, "lost", [1])])
def test_a_task_that_deletes_its_row_has_no_outcome_unless_this_is_rolled_back(is_atomic, outcome, kept):
    @local(atomic=is_atomic)
    def loses():
        write.func(1)
        Task.objects.all().delete()

    loses.enqueue()
    assert outcomes(run_tasks()) == [outcome]
    assert numbers() == kept


@both
def test_blocks_of_a_function_are_nested_as_in_a_worker():
    seen = []

    @local()
    def nested():
        with transaction.atomic(durable=True):
            write.func(1)
            transaction.on_commit(lambda: seen.append("hook"))
            with pytest.raises(ValueError, match="inner"), transaction.atomic():
                write.func(2)
                transaction.on_commit(lambda: seen.append("rolled back"))
                raise ValueError("inner")

    nested.enqueue()
    assert outcomes(run_tasks()) == ["succeeded"]
    assert numbers() == [1]
    assert seen == ["hook"]


@both
def test_hooks_of_the_commit_enqueue_tasks_that_run():
    @local()
    def first():
        with transaction.atomic():
            transaction.on_commit(lambda: write.enqueue(2))

    with transaction.atomic():
        transaction.on_commit(lambda: first.enqueue())
    runs = run_tasks()
    assert outcomes(runs) == ["succeeded", "succeeded"]
    assert numbers() == [2]
    assert run_tasks() == []


@pytest.mark.django_db
def test_an_error_of_a_hook_is_raised_unless_it_is_robust(caplog):
    def fails():
        raise ValueError("hook")

    transaction.on_commit(fails, robust=True)
    transaction.on_commit(lambda: write.enqueue(1))
    assert outcomes(run_tasks()) == ["succeeded"]
    assert "A hook of the commit raised an error" in caplog.text
    transaction.on_commit(fails)
    with pytest.raises(ValueError, match="hook"):
        run_tasks()


@both
def test_tasks_of_one_lock_key_run_in_order_also_if_the_first_is_retried():
    calls, left = [], [ConnectionError("down")]

    @local(lock="order:{order}", max_attempts=2, backoff=3600)
    def order(order, number):
        calls.append(number)
        if left:
            raise left.pop()

    for number in range(3):
        order.enqueue(order=1, number=number)
    assert outcomes(run_tasks(until="due")) == ["retried"]
    assert outcomes(run_tasks()) == ["succeeded"] * 3
    assert calls == [0, 0, 1, 2]


@both
def test_a_group_is_one_call():
    calls = []

    @local(group=Group("index", limit=3, gather=300))
    def index(rows):
        calls.append([each["number"] for each in rows])
        return len(rows)

    for number in range(5):
        index.enqueue(number=number)
    assert run_tasks(until="due") == []
    runs = run_tasks()
    assert calls == [[0, 1, 2], [3, 4]]
    assert outcomes(runs) == ["succeeded"] * 5
    assert [each.result.return_value for each in runs] == [3, 3, 3, 2, 2]


@both
def test_a_rate_does_not_make_the_test_wait():
    limited = task(rate=Rate(2, per=3600, burst=2))(write.func)
    for number in range(5):
        limited.enqueue(number)
    assert len(run_tasks(until="due")) == 2
    assert len(run_tasks()) == 3
    assert numbers() == list(range(5))
    # The last token was taken as if its time had come.
    assert RateLimit.objects.get().opens_at is None


@both
def test_the_start_of_a_task_takes_its_token_also_if_it_has_waited():
    task(rate=Rate(1, per=3600))(write.func).enqueue()
    RateLimit.objects.update(arrives_at="2020-01-01T00:00Z")
    run_tasks()
    assert RateLimit.objects.get().arrives_at > timezone.now()


@both
def test_a_task_that_another_program_has_written_is_admitted_to_its_key():
    Task.objects.create(queue="default", backend="default", task_path=write.module_path, status="BLOCKED", lock_key="a")
    assert outcomes(run_tasks(until="due")) == ["succeeded"]


@both
def test_signals_context_progress_and_logs_are_those_of_a_worker(monkeypatch):
    # A worker asks from time to time whether there are receivers.
    monkeypatch.setattr(logs, "CHECK_INTERVAL", 3600.0)
    logs.has_observers()
    seen = []

    @local(takes_context=True, capture_logs="INFO")
    def reports(context):
        logging.getLogger("shop").warning("half")
        context.progress(1, 2)
        return context.attempt

    def note(sender, task_result, **kwargs):
        seen.append(task_result.status)

    for signal in (task_started, task_finished):
        signal.connect(note)
    try:
        result = reports.enqueue()
        run_tasks()
    finally:
        for signal in (task_started, task_finished):
            signal.disconnect(note)
    assert seen == ["RUNNING", "SUCCESSFUL"]
    row = Task.objects.get(pk=result.id)
    assert row.progress == {"done": 1, "total": 2}
    assert "half" in row.log
    assert Number.objects.filter(seconds=60, task_path=reports.module_path, kind="succeeded").get().count == 1


@both
def test_an_async_task_uses_the_connection_of_the_test():
    @local()
    async def create(number):
        await asyncio.sleep(0)
        await Effect.objects.acreate(name="run", number=number)
        if number > 1:
            raise ValueError
        return number

    create.enqueue(1)
    create.enqueue(2)
    runs = run_tasks()
    assert outcomes(runs) == ["succeeded", "failed"]
    assert runs[0].result.return_value == 1
    assert numbers() == [1, 2]


@both
def test_timeouts_are_those_of_a_worker():
    @local(timeout=0.05)
    async def sleeps():
        await asyncio.sleep(60)

    @local(timeout=0.05)
    def loops():
        try:
            while True:
                execute_sql("SELECT pg_sleep(0.01)")
        except Exception:
            pytest.fail("swallowed")

    sleeps.enqueue()
    loops.enqueue()
    runs = run_tasks()
    assert [type(each.exception) for each in runs] == [TaskTimeout, TaskTimeout]
    assert run_tasks() == []
    assert Task.objects.count() == 2


@both
def test_a_task_that_closes_its_connection_does_not_end_the_test():
    @local()
    def closes(is_atomic):
        write.func(1)
        if is_atomic:
            with transaction.atomic():
                write.func(2)
                connection.close()
        else:
            connection.close()
        write.func(3)

    closes.enqueue(False)
    closes.enqueue(True)
    closes.using(atomic=True).enqueue(False)
    assert outcomes(run_tasks()) == ["succeeded", "succeeded", "failed"]
    assert numbers() == [1, 3, 1, 3]
    assert "close" not in vars(connection)


@pytest.mark.django_db(transaction=True)
def test_the_connection_is_in_order_for_the_next_task():
    @local()
    def leaves(how):
        if how == "autocommit off":
            transaction.set_autocommit(False)
            write.func(1)
        elif how == "begin":
            execute_sql("BEGIN")
            write.func(1)
        elif how == "closed":
            connection.connection.close()
        else:
            connection.close()

    for how in ("autocommit off", "begin", "closed", "closed by Django"):
        leaves.enqueue(how)
        write.enqueue(2)
    assert outcomes(run_tasks()) == ["succeeded"] * 8
    assert numbers() == [2] * 4
    assert connection.get_autocommit()


@both
def test_no_worker_is_needed_and_none_is_left():
    threads = set(threading.enumerate())
    write.enqueue()
    run_tasks()
    assert set(threading.enumerate()) <= threads
    assert not Worker.objects.exists()


@pytest.mark.django_db
def test_a_real_worker_in_a_testcase_is_refused_and_names_it():
    with pytest.raises(ConfigurationError, match=r"call django_pglock\.testing\.run_tasks\(\)"):
        RealWorker(drain=True).run()


@pytest.mark.django_db(transaction=True)
def test_it_is_refused_beside_a_worker_which_would_take_the_claims_back():
    write.enqueue()
    Worker.objects.create(id=uuid4(), parent=uuid4(), name="shop-1", pid=1, threads=1, queues=[])
    with pytest.raises(ConfigurationError, match=r"Worker shop-1 runs .* Stop it"):
        run_tasks()


@both
def test_it_is_refused_inside_of_a_block():
    with transaction.atomic(), pytest.raises(ConfigurationError, match="after the end of the atomic"):
        run_tasks()


@both
def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match='"idle" or "due"'):
        run_tasks(until="never")
    with pytest.raises(ConfigurationError, match="nowhere"):
        run_tasks(using="nowhere")


@both
def test_an_async_test_runs_tasks_in_the_thread_of_its_connection():
    @local()
    async def create():
        await Effect.objects.acreate(name="run", number=1)

    async def call():
        await create.aenqueue()
        await write.aenqueue(2)
        return await sync_to_async(run_tasks)()

    assert outcomes(async_to_sync(call)()) == ["succeeded"] * 2
    assert numbers() == [1, 2]


def test_it_is_refused_in_a_coroutine():
    async def call():
        run_tasks()

    with pytest.raises(Exception, match=r"await sync_to_async\(run_tasks\)"):
        async_to_sync(call)()
