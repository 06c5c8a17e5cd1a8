"""The transaction that a transaction lock opens: committed, rolled back, or ended with its session."""

from __future__ import annotations

import threading

import pytest
from django.db import DatabaseError, IntegrityError, close_old_connections, connection, connections

from django_pglock import LockLost, lock
from tests.db.locks.sessions import advisory_rows, execute
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_transaction_lock_outside_opens_its_own_transaction(somebody):
    with lock("a", scope="transaction"):
        assert connection.in_atomic_block
        Effect.objects.create(name="inside")
        assert not somebody.can_have("a")
    assert not connection.in_atomic_block
    assert somebody.can_have("a")
    with pytest.raises(ZeroDivisionError), lock("a", scope="transaction"):
        Effect.objects.create(name="undone")
        1 / 0  # noqa: B018
    assert list(Effect.objects.values_list("name", flat=True)) == ["inside"]


def test_an_exception_that_is_false_rolls_the_transaction_of_a_lock_back():
    """An exception with a length may be empty. Before, the changes of the block were committed."""

    class Problems(Exception):
        def __len__(self):
            return 0

    with pytest.raises(Problems), lock("a", scope="transaction"):
        Effect.objects.create(name="undone")
        raise Problems
    assert not Effect.objects.exists()


def test_the_session_of_an_own_transaction_ends_where_another_thread_drops_it(eventually, somebody):
    """Only one thread may use a libpq connection at a time, and the owner may be using it at that moment."""

    def numbers():
        with lock("a", scope="transaction"):
            yield 1

    box, dropped = [], threading.Event()

    def work():
        generator = numbers()
        next(generator)
        box.append(generator)
        del generator
        with pytest.raises(DatabaseError):
            while True:
                execute("SELECT repeat('x', 100000) FROM generate_series(1, 5)")
        # As at the end of a request. Before, Django stayed in the block, and each later statement failed.
        close_old_connections()
        execute("SELECT 1")
        dropped.set()
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    eventually(lambda: box)
    box.clear()
    thread.join(60)
    assert dropped.is_set()
    eventually(lambda: somebody.can_have("a"))


def test_a_session_that_ends_in_the_commit_of_a_lock_is_reported_as_a_lost_lock():
    """No check before the COMMIT can see it."""
    execute("CREATE TEMP TABLE last (number int)")
    execute(
        "CREATE FUNCTION pg_temp.leave() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60); RETURN NULL; END'"
    )
    execute(
        "CREATE CONSTRAINT TRIGGER leave AFTER INSERT ON last DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION pg_temp.leave()"
    )
    with pytest.raises(LockLost, match="its session has ended") as lost, lock("a", scope="transaction"):
        execute("INSERT INTO last VALUES (1)")
    assert isinstance(lost.value.__cause__, DatabaseError)
    with lock("a", scope="transaction"):
        Effect.objects.create(name="done")
    assert Effect.objects.count() == 1


def test_an_error_of_the_commit_of_a_lock_is_passed_on_if_the_session_lives():
    execute("CREATE TEMP TABLE once (number int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    with pytest.raises(IntegrityError), lock("a", scope="transaction"):
        execute("INSERT INTO once VALUES (1), (1)")
    assert advisory_rows() == 0
