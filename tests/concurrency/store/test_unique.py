"""Unique calls in transactions, concurrent with claims of the waiting task."""

from __future__ import annotations

import threading
from contextlib import closing
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from psycopg.errors import SerializationFailure

from django_pglock import enqueue_many
from django_pglock.errors import DuplicateTask
from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import statements, unique
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.store.unique import FIND_AND_LOCK_UNIQUE, FIND_UNIQUE
from django_pglock.tasks.options import Unique
from tests.conftest import NEVER
from tests.sample.keyed_tasks import rebuild, refresh

pytestmark = pytest.mark.django_db(transaction=True)

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
#: How many sessions wait for a lock of another one.
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
#: The same inside of a transaction, which otherwise reads once for all its statements.
WAITING_NOW = f"SELECT pg_stat_clear_snapshot(); {WAITING}"
#: The two steps of a claim, which are one statement of a worker.
LOCK = "SELECT FROM django_pglock_task FOR NO KEY UPDATE SKIP LOCKED"
CLAIM = "UPDATE django_pglock_task SET attempts = 1"


@pytest.fixture
def claimed(in_threads):
    """Claim in another session all tasks that are free, as a worker does; return their ids."""

    def claim(number):
        worker = uuid4()
        statement = claim_statement("default", worker=worker, paths=[refresh.module_path, rebuild.module_path])
        return [str(each.id) for each in claims_of(statement.execute(10, "default"), worker)]

    return lambda: in_threads(claim, 1)[0]


def begin(level):
    """Begin the transaction's snapshot; only READ COMMITTED has another one for each statement."""
    value(f"SET TRANSACTION ISOLATION LEVEL {level}; SELECT count(*) FROM django_pglock_task")


def value(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        while cursor.nextset():
            pass
        return cursor.fetchone()[0]


def one(task):
    return task.enqueue(1).id


def many(task):
    return enqueue_many(task, [(2,), (1,)])[1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("enqueue", [one, many])
def test_a_waiting_task_reused_by_a_unique_call_is_not_claimed_before_the_commit(claimed, enqueue, level):
    """The changes of the transaction are invisible until then, so a run before the commit would miss them."""
    first = refresh.enqueue(1)
    with transaction.atomic():
        begin(level)
        assert enqueue(refresh) == first.id
        assert claimed() == []
    assert first.id in claimed()


@pytest.mark.parametrize("level", LEVELS)
def test_a_unique_call_after_the_claim_of_the_waiting_task_makes_another_task(claimed, level):
    """Also in a transaction whose snapshot still shows the task as waiting."""
    first = refresh.enqueue(1)
    with transaction.atomic():
        begin(level)
        assert claimed() == [first.id]
        second = refresh.enqueue(1)
    assert claimed() == [second.id]


@pytest.mark.parametrize(
    ("level", "on_conflict"), [*((level, "skip") for level in LEVELS), ("READ COMMITTED", "replace")]
)
def test_a_unique_call_concurrent_with_the_claim_of_the_waiting_task_is_not_lost(eventually, level, on_conflict):
    """The claim locks the row first. Then the call is written, or the whole transaction must be tried again."""
    task = refresh.using(unique=Unique("{number}", on_conflict=on_conflict))
    task.enqueue(1)
    errors = []
    with closing(dedicated_connection("default")) as worker, worker.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(LOCK)

        def call():
            try:
                with transaction.atomic():
                    begin(level)
                    task.enqueue(1)
            except OperationalError as error:
                errors.append(error)
            finally:
                connections.close_all()

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        eventually(lambda: value(WAITING) == 1 or not caller.is_alive())
        cursor.execute(CLAIM)
        cursor.execute("COMMIT")
    caller.join(NEVER)
    attempts = list(Task.objects.order_by("id").values_list("attempts", flat=True))
    if level == "READ COMMITTED":
        assert (attempts, errors) == ([1, 0], [])
    else:
        [error] = errors
        assert attempts == [1]
        assert isinstance(error.__cause__, SerializationFailure)


def test_waiting_tasks_reused_by_unique_calls_are_locked_in_key_order(eventually):
    """The second key belongs to the older row and to the first call. Two such transactions cannot deadlock."""
    task = refresh.using(unique=Unique("{number}"))
    rows = {number: int(task.enqueue(number).id) for number in (2, 1)}
    with closing(dedicated_connection("default")) as other, other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT FROM django_pglock_task WHERE id = %s FOR UPDATE", [rows[2]])

        def call():
            with transaction.atomic():
                enqueue_many(task, [(2,), (1,)])
            connections.close_all()

        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        eventually(lambda: value(WAITING) == 1 or not caller.is_alive())
        cursor.execute(LOCK.replace("SELECT", "SELECT id"))
        assert cursor.fetchall() == [(rows[2],)], "the other one is locked before the caller waits"
        cursor.execute("COMMIT")
    caller.join(NEVER)
    assert not caller.is_alive()


def test_unique_calls_that_replace_take_the_keys_in_their_order(eventually):
    """The second key has a task already. It is not locked while the call waits for another transaction's first key."""
    task = refresh.using(unique=Unique("{number}", on_conflict="replace"))
    waiting = int(task.enqueue(2).id)

    def call():
        with transaction.atomic():
            enqueue_many(task, [(2,), (1,)])
        connections.close_all()

    caller = threading.Thread(target=call, daemon=True)
    with transaction.atomic():
        task.enqueue(1)
        caller.start()
        eventually(lambda: value(WAITING_NOW) == 1 or not caller.is_alive())
        assert value(f"SELECT count(*) FROM ({LOCK}) AS free") == 2
    caller.join(NEVER)
    assert not caller.is_alive()
    assert Task.objects.filter(id=waiting).exists()


@pytest.mark.parametrize("enqueue", [one, many])
@pytest.mark.parametrize("on_conflict", ["replace", "skip", "raise"])
def test_two_unique_calls_that_waited_for_the_same_commit_do_not_deadlock(
    eventually, monkeypatch, in_threads, enqueue, on_conflict
):
    """Both find the committed task at the same time, and each continues only when both have found it."""
    task = refresh.using(unique=Unique("{number}", on_conflict=on_conflict))
    both, has_found = threading.Barrier(2, timeout=NEVER), threading.local()

    def found_by_both(using, statement, *values):
        rows = statements.run(using, statement, *values)
        if statement in (FIND_UNIQUE, FIND_AND_LOCK_UNIQUE) and not hasattr(has_found, "it"):
            has_found.it = True
            both.wait()
        return rows

    def call(_number):
        try:
            with transaction.atomic():
                return enqueue(task)
        except DuplicateTask as error:
            return error.result_id
        finally:
            connections.close_all()

    monkeypatch.setattr(unique, "run", found_by_both)
    results = []
    callers = threading.Thread(target=lambda: results.extend(in_threads(call, 2)), daemon=True)
    with transaction.atomic():
        many(task)
        callers.start()
        eventually(lambda: value(WAITING_NOW) == 2 or not callers.is_alive())
    callers.join(NEVER)
    assert results == [str(Task.objects.get(args=[1]).pk)] * 2


@pytest.mark.parametrize("enqueue", [one, many])
def test_a_unique_call_outside_a_transaction_locks_no_row(enqueue):
    """The changes of the caller are committed, so each run that begins from now on sees them."""
    refresh.enqueue(1)
    with CaptureQueriesContext(connection) as outside:
        enqueue(refresh)
    with CaptureQueriesContext(connection) as inside, transaction.atomic():
        enqueue(refresh)
    statements = [
        [each["sql"] for each in queries if "django_pglock_task" in each["sql"]] for queries in (outside, inside)
    ]
    assert [sum("FOR SHARE" in each for each in some) for some in statements] == [0, 1]
    assert len(statements[0]) == len(statements[1]), "and where it has one, that takes no further statement"


def test_a_task_that_is_unique_until_it_ends_is_claimed_beside_the_caller(claimed):
    """The running task keeps its key in any case, and may have read all data already."""
    first = rebuild.enqueue(1)
    with transaction.atomic():
        assert rebuild.enqueue(1).id == first.id
        assert claimed() == [first.id]
        assert rebuild.enqueue(1).id == first.id
