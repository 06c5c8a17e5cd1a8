"""Statements after a commit may fail, for example because the session is lost. The commit is valid."""

from __future__ import annotations

import pytest
from django.db import DataError, InternalError, OperationalError, connection, transaction

from django_pglock import DuplicateTask, Unique, enqueue_many
from django_pglock.models import Queue, Schedule, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import admit, enqueue, release, wake
from django_pglock.tasks.states import TaskStatus
from tests.conftest import NEVER
from tests.db.admin.visits import make
from tests.db.store.endings import statuses
from tests.db.store.workers import add_sleeping_worker
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def raise_error(*values, **options):
    raise OperationalError("the session is lost")


def enqueue_at_a_key():
    keyed.step.enqueue("a")


def enqueue_several_at_keys():
    keyed.step.enqueue("a")
    keyed.call.enqueue("b")


def enqueue_after_another():
    tasks.nothing.using(after=[tasks.nothing.enqueue()]).enqueue()


def ask_to_end():
    Task.objects.filter(status="RUNNING").cancel()


@pytest.mark.parametrize(
    ("module", "name", "verb"),
    [
        (wake, "_notify", tasks.nothing.enqueue),
        (enqueue, "send", enqueue_at_a_key),
        (admit, "locking", lambda: enqueue_many(keyed.step, ["a", "b"])),
        (release, "ended", enqueue_after_another),
        (wake, "run", ask_to_end),
    ],
)
def test_a_failure_after_the_commit_is_logged_and_not_raised(monkeypatch, caplog, claim, module, name, verb):
    """Otherwise the caller would regard the committed transaction as failed, and its own hooks would not run."""
    tasks.nothing.enqueue()
    claim()
    called = []
    monkeypatch.setattr(module, name, raise_error)
    with transaction.atomic():
        verb()
        transaction.on_commit(lambda: called.append(True))
    assert called
    assert "the session is lost" in caplog.text
    assert "<locals>" not in caplog.text, "the log names the function that has failed"


def test_a_failure_after_a_call_without_a_transaction_is_logged_and_not_raised(monkeypatch, caplog):
    """The call is committed. If the caller tried again, there would be two tasks."""
    monkeypatch.setattr(admit, "locking", raise_error)
    for _ in range(2):
        keyed.call.enqueue("b")
    assert statuses() == ["READY", "BLOCKED"]
    assert "the session is lost" in caplog.text


# A transaction that the caller commits itself: Django calls no function after its commit.

VERBS = {
    "plain": tasks.nothing.enqueue,
    "lock": enqueue_at_a_key,
    "locks": enqueue_several_at_keys,
    "rate": lambda: keyed.trickle.enqueue(1),
    "unique": lambda: keyed.refresh.enqueue(1),
    "plain, many": lambda: enqueue_many(tasks.nothing, [()] * 3),
    "after": enqueue_after_another,
    "retry": lambda: Task.objects.all().retry(),
    "cancel": lambda: Task.objects.all().cancel(),
}


@pytest.fixture(params=["autocommit off", "BEGIN"])
def manual(request):
    """Begin such a transaction. Return a function that commits it."""
    if request.param == "BEGIN":
        connection.cursor().execute("BEGIN")
        yield lambda: connection.cursor().execute("COMMIT")
    else:
        transaction.set_autocommit(False)
        yield transaction.commit
    connection.rollback()
    transaction.set_autocommit(True)


def test_the_notifications_of_a_transaction_committed_by_the_caller_are_sent_by_its_commit(manual, session):
    session.ensure_connection()
    session.connection.execute("LISTEN told")
    wake.notify_after_commit("default", "SELECT pg_notify('told', %s)", "first")
    session.connection.execute("NOTIFY told, 'before the commit'")
    manual()
    notes = session.connection.notifies(timeout=NEVER, stop_after=2)
    assert [note.payload for note in notes] == ["before the commit", "first"]


def test_upkeep_is_told_of_blocked_tasks_by_a_commit_of_the_caller(manual, session):
    """Before, an idle worker found them in its next round, after a minute and a half."""
    session.ensure_connection()
    session.connection.execute(f"LISTEN {wake.SCHEDULED_CHANNEL}")
    add_sleeping_worker()
    keyed.trickle.enqueue(1)
    manual()
    [note] = session.connection.notifies(timeout=NEVER, stop_after=1)
    assert note.payload == "blocked"


def test_tasks_of_a_transaction_committed_by_the_caller_run(manual, worker, eventually):
    """The commit itself wakes a sleeping worker. Upkeep admits the tasks with keys."""
    running = worker()
    eventually(lambda: running.feeder.asks)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL synchronous_commit = local")
        for verb in VERBS.values():
            verb()
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("local",), "statements after a commit of ours set this"
    manual()
    eventually(lambda: Task.objects.exists() and not Task.objects.filter(finished_at=None).exists())
    transaction.commit()


# After a BEGIN of the caller, Django does not know of the transaction, and cannot open a block of ``atomic()`` in it.


def claim_one():
    with Task.objects.filter(status="READY").claim(1) as rows:
        assert len(rows) == 1


def enqueue_a_duplicate():
    with pytest.raises(DuplicateTask):
        enqueue_many(keyed.refresh.using(unique=Unique(on_conflict="raise")), [{"number": 1}] * 2)


IN_BLOCKS = {
    "enqueue_many": lambda: enqueue_many(tasks.nothing, [()] * 3),
    "enqueue_many, unique": lambda: enqueue_many(keyed.refresh, [{"number": 1}, {"number": 2}]),
    "enqueue_many, refused": enqueue_a_duplicate,
    "after": enqueue_after_another,
    "retry": lambda: Task.objects.all().retry(),
    "cancel": lambda: Task.objects.all().cancel(),
    "discard": lambda: Task.objects.all().discard(),
    "run_now": lambda: Task.objects.all().run_now(),
    "move_to_queue": lambda: Task.objects.all().move_to_queue("mail"),
    "reset_stuck": lambda: Task.objects.all().reset_stuck(),
    "delete_finished": lambda: Task.objects.all().delete_finished(),
    "prune": lambda: Task.objects.all().prune(older_than=0),
    "claim": claim_one,
    "pause": lambda: Queue.objects.pause("mail"),
    "schedules": lambda: Schedule.objects.run_now(),
}


def contents():
    models = (Task, Queue)
    return [sorted(model.objects.values_list("pk", *(["status"] if model is Task else []))) for model in models]


@pytest.mark.parametrize("verb", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_a_verb_after_a_begin_is_a_part_of_that_transaction(verb):
    for status in TaskStatus.values:
        make(status)
    before = contents()
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        verb()
        tasks.nothing.enqueue()
        assert contents() != before
        assert connection.get_autocommit()
        assert not connection.in_atomic_block
        cursor.execute("ROLLBACK")
    assert contents() == before
    with transaction.atomic():
        tasks.nothing.enqueue()
    assert contents() != before


def test_after_an_error_in_such_a_transaction_the_verb_raises_postgresqls_error():
    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        with pytest.raises(DataError):
            cursor.execute("SELECT 1 / 0")
        with pytest.raises(InternalError, match="current transaction is aborted"):
            enqueue_many(tasks.nothing, [()] * 3)
        cursor.execute("ROLLBACK")
    assert len(enqueue_many(tasks.nothing, [()] * 3)) == 3
    assert not connection.in_atomic_block


def test_after_such_a_transaction_has_lost_its_session_the_next_verb_gets_another_one():
    def calls():
        yield ()
        pid = connection.connection.info.backend_pid
        other = dedicated_connection("default")
        other.cursor().execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
        other.close()
        yield ()

    connection.cursor().execute("BEGIN")
    with pytest.raises(OperationalError):
        enqueue_many(tasks.nothing, calls())
    connection.close()
    assert len(enqueue_many(tasks.nothing, [()] * 3)) == 3
    assert Task.objects.count() == 3
