"""What the database refuses before a function is called or after it has returned is not the task's failure.

But a change of the function that is refused at the end, such as by a deferred constraint, is.
"""

from __future__ import annotations

import threading

import pytest
from django.db import OperationalError, connection, transaction
from django.db.backends.signals import connection_created

from django_pglock.models import Attempt as AttemptRow
from django_pglock.models import Task
from django_pglock.store import rescue
from django_pglock.worker.child import child, run
from django_pglock.worker.child.attempt import Attempt
from django_pglock.worker.child.event_loop import EventLoop
from tests.db.worker.conftest import wait_for_end
from tests.sample import session_tasks, tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

#: PostgreSQL's codes: a right is missing, a trigger raises, the disk is full, a statement takes too long, a lock is
#: held, the transaction can only read, an operator intervenes.
REFUSALS = ("42501", "P0001", "53100", "57014", "55P03", "25006", "57P03")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(rescue, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(rescue, "LONGEST_PAUSE", 0.1)


@pytest.fixture(params=["by libpq", "by a cursor"])
def sent(request):
    """Send messages in each of the two ways. Django's cursor is used where somebody watches the statements."""

    def watch(connection, **kwargs):
        connection.execute_wrappers.append(lambda execute, *args: execute(*args))

    if request.param == "by a cursor":
        connection_created.connect(watch)
    yield
    connection_created.disconnect(watch)


@pytest.fixture
def role_limits():
    """Give the role of all new sessions limits, as a DBA does."""
    names = ["lock_timeout", "statement_timeout"] + ["transaction_timeout"] * (connection.pg_version >= 170000)
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"ALTER ROLE CURRENT_USER SET {name} = '300ms'")
    yield
    with connection.cursor() as cursor:
        for name in names:
            cursor.execute(f"ALTER ROLE CURRENT_USER RESET {name}")


WAITS = """
SELECT count(*) FROM pg_stat_activity
WHERE pid = ANY (SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'django_pglock_task'::regclass)
  AND query ~ 'COMMIT$' AND clock_timestamp() - query_start > interval '1 s'
"""


def test_limits_of_the_role_do_not_decide_over_the_last_statement(worker, eventually, somebody, role_limits):
    """Before, 24 of 24 tasks were FAILED after a lock of a few seconds, although their functions had returned."""
    session_tasks.HAS_BEGUN.clear()
    session_tasks.GO_ON.clear()
    worker(threads=1)
    result = session_tasks.pause_then_write.enqueue()
    assert session_tasks.HAS_BEGUN.wait(60)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("LOCK TABLE django_pglock_task IN SHARE MODE")
        session_tasks.GO_ON.set()
        eventually(lambda: somebody.ask(WAITS), why="its last statement does not wait")
    row = wait_for_end(result, eventually)
    assert (row.status, row.attempts, AttemptRow.objects.count()) == ("SUCCESSFUL", 1, 0)
    assert Effect.objects.count() == 1


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_of_our_table_is_no_failure_however_often(worker, eventually, refusing, sent, code):
    """More often than MAX_RESCUES, with one attempt: the task runs again until the table takes its success."""
    refusing(code)
    worker(threads=1)
    result = tasks.record_atomically.enqueue("once")
    eventually(lambda: AttemptRow.objects.count() > 5 or Task.objects.get().finished_at, why="it is not repeated")
    refusing.stop()
    row = wait_for_end(result, eventually)
    assert (row.status, row.retries) == ("SUCCESSFUL", 0)
    assert row.rescues <= 1, "the table may take it a moment after the last refusal"
    assert set(AttemptRow.objects.values_list("outcome", flat=True)) == {"LOST"}
    assert Effect.objects.count() == 1


def test_a_refusal_of_one_attempt_alone_counts_as_a_rescue(worker, eventually, refusing):
    """Again and again the same task is refused, and the table takes others. It ends with a reason."""
    refusing("55P03", "pg_backend_pid() <> 0 AND current_setting('app.refuse', true) = 'yes'")
    worker(threads=1)
    row = wait_for_end(session_tasks.set_local.enqueue("app.refuse", "yes"), eventually)
    assert (row.status, row.retries, row.rescues) == ("FAILED", 0, 3)
    assert "MAX_RESCUES" in AttemptRow.objects.order_by("number").last().traceback
    assert wait_for_end(tasks.record_atomically.enqueue("next"), eventually).status == "SUCCESSFUL"


@pytest.mark.parametrize(
    ("name", "value"), [("search_path", "pg_catalog"), ("role", "pg_monitor"), ("transaction_read_only", "on")]
)
def test_a_setting_that_the_function_leaves_does_not_repeat_it_for_ever(worker, eventually, name, value):
    worker(threads=1)
    row = wait_for_end(session_tasks.set_local.enqueue(name, value), eventually)
    assert (row.status, row.retries, row.rescues) == ("FAILED", 0, 3)
    assert wait_for_end(tasks.record_atomically.enqueue("next"), eventually).status == "SUCCESSFUL"


@pytest.fixture
def deferred():
    """Check the rows of a table at the end of each transaction."""

    def check(body):
        with connection.cursor() as cursor:
            cursor.execute(
                f"CREATE FUNCTION check_late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body}; RETURN NULL; END $$"
            )
            cursor.execute(
                "CREATE CONSTRAINT TRIGGER check_late AFTER INSERT ON sample_effect "
                "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION check_late()"
            )

    yield check
    execute_sql("DROP FUNCTION check_late() CASCADE")


@pytest.mark.parametrize(
    "body",
    [
        "RAISE 'wrong'",
        "RAISE 'wrong' USING ERRCODE = '23514'",
        "RAISE 'wrong' USING ERRCODE = '40001'",
        "PERFORM 1 / 0",  # with the code by which our statement tells that the claim is lost
        "PERFORM missing()",
    ],
)
def test_a_change_that_is_refused_at_commit_is_the_tasks_failure(worker, eventually, deferred, sent, body):
    deferred(body)
    worker(threads=1)
    row = wait_for_end(tasks.record_atomically.enqueue("wrong"), eventually)
    assert (row.status, row.attempts, row.retries, row.rescues) == ("FAILED", 1, 0, 0)
    assert set(AttemptRow.objects.values_list("outcome", flat=True)) == {"FAILED"}
    assert not Effect.objects.exists()


BEFORE_CALL = {
    "no memory for the arguments": (Attempt, "__init__", MemoryError()),
    "no memory around the call": (Attempt, "observe", MemoryError()),
    "no session": (run, "connection_for", OperationalError("FATAL:  sorry, too many clients already")),
    "no file descriptor": (run, "connection_for", OSError(24, "Too many open files")),
    "no thread": (EventLoop, "run", RuntimeError("can't start new thread")),
    "no thread for the call": (Attempt, "begin", RuntimeError("can't start new thread")),
    "no thread for the call of a coroutine": (Attempt, "begin", RuntimeError("can't start new thread")),
}


@pytest.mark.parametrize("what", BEFORE_CALL)
def test_a_process_that_cannot_begin_tasks_gives_them_back_and_ends(worker, monkeypatch, eventually, caplog, what):
    """Before, it took tasks as fast as they came, and each of them was FAILED without a start."""
    place, name, error = BEFORE_CALL[what]
    monkeypatch.setattr(child, "LONGEST_UNABLE", 1.0)
    task = tasks.sleep_async if "coroutine" in what or what == "no thread" else tasks.record_atomically
    for _ in range(10):
        task.enqueue(0)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, raising(error))
        process = worker(threads=2)
        sick = process.child
        eventually(lambda: process.child is not sick, why="it is not replaced")
        assert "has no memory, threads, file descriptors or sessions" in caplog.text
        assert process.shutdown()
    assert {*Task.objects.values_list("status", "retries", "rescues")} == {("READY", 0, 0)}
    assert {row.attempts_made for row in Task.objects.all()} == {0}
    assert not AttemptRow.objects.exists()
    attempts, processes = sum(Task.objects.values_list("attempts", flat=True)), len(process._starter.children)
    assert attempts < 20 * processes, "it took them as fast as they came"


@pytest.mark.parametrize("name", ["lockworker-async-starter", "lockworker-orm_0", "lockworker-loop"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_process_without_a_thread_for_coroutines_is_replaced(worker, monkeypatch, eventually, name):
    """Its claim is in flight already. It must not stay there as long as the process lives."""
    start, failures = threading.Thread.start, iter([True])

    def fail_once(thread):
        if thread.name == name and next(failures, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    process = worker()
    first = process.child
    row = wait_for_end(tasks.sleep_async.enqueue(0), eventually)
    assert (row.status, row.worker, row.attempts_made, row.rescues) == ("SUCCESSFUL", process.id, 1, 0)
    assert first.id != process.id


def raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_a_process_that_begins_some_tasks_goes_on(worker, eventually, monkeypatch):
    """One task of many needs more memory than there is. Its process runs the others."""
    monkeypatch.setattr(child, "LONGEST_UNABLE", 0.0)
    begin = Attempt.__init__

    def fail_sometimes(attempt, claim, using):
        if claim.attempt == 1 and claim.id % 2:
            raise MemoryError
        begin(attempt, claim, using)

    monkeypatch.setattr(Attempt, "__init__", fail_sometimes)
    running = worker(threads=1)
    for number in range(4):
        tasks.record.enqueue("each", number)
    eventually(lambda: Effect.objects.count() == 4)
    assert {row.attempts_made for row in Task.objects.all()} == {1}
    eventually(lambda: running.in_flight.unable_for == 0.0)
