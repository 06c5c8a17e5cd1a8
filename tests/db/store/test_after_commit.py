"""Statements after a commit may fail, for example because the session is lost. The commit is valid."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import admit, after_commit, release, wake
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
        (admit, "_admit_by", enqueue_at_a_key),
        (admit, "_admit_by", enqueue_several_at_keys),
        (release, "ended", enqueue_after_another),
        (after_commit, "run", ask_to_end),
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
#: Verbs that need a block of ``atomic()``, which Django refuses after a BEGIN.
NEED_ATOMIC = ("plain, many", "after", "retry", "cancel")


@pytest.fixture(params=["autocommit off", "BEGIN"])
def manual(request):
    """Begin such a transaction. Return the verbs that are possible in it, and a function that commits it."""
    if request.param == "BEGIN":
        connection.cursor().execute("BEGIN")
        possible = [verb for name, verb in VERBS.items() if name not in NEED_ATOMIC]
        yield possible, lambda: connection.cursor().execute("COMMIT")
    else:
        transaction.set_autocommit(False)
        yield list(VERBS.values()), transaction.commit
    connection.rollback()
    transaction.set_autocommit(True)


def test_tasks_of_a_transaction_committed_by_the_caller_run(manual, worker, eventually):
    """The commit itself wakes a sleeping worker. Upkeep admits the tasks with keys."""
    verbs, commit = manual
    running = worker()
    eventually(lambda: running.sleep.since)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL synchronous_commit = local")
        for verb in verbs:
            verb()
        cursor.execute("SHOW synchronous_commit")
        assert cursor.fetchone() == ("local",), "statements after a commit of ours set this"
    commit()
    eventually(lambda: Task.objects.exists() and not Task.objects.filter(finished_at=None).exists())
    transaction.commit()


def test_a_notification_is_delivered_with_the_commit_of_the_caller(manual):
    _, commit = manual
    listener = dedicated_connection("default")
    try:
        with listener.cursor() as cursor:
            cursor.execute(f"LISTEN {wake.READY_CHANNEL}")
            tasks.nothing.enqueue()
            cursor.execute("SELECT 1")
            raw = listener.connection
            assert list(raw.notifies(timeout=0)) == []
            commit()
            assert [each.payload for each in raw.notifies(timeout=10, stop_after=1)] == ["default"]
    finally:
        listener.close()


def test_a_verb_with_a_block_of_its_own_notifies_with_the_commit_of_the_caller():
    """With autocommit off, a block of ``atomic()`` commits nothing, and Django keeps its on_commit hooks."""
    transaction.set_autocommit(False)
    listener = dedicated_connection("default")
    try:
        with listener.cursor() as cursor:
            cursor.execute(f"LISTEN {wake.READY_CHANNEL}")
            enqueue_many(tasks.nothing, [()] * 3)
            with transaction.atomic(), transaction.atomic():
                tasks.nothing.using(queue_name="mail").enqueue()
            assert connection.run_on_commit == []
            transaction.commit()
            raw = listener.connection
            assert {each.payload for each in raw.notifies(timeout=10, stop_after=2)} == {"default", "mail"}
    finally:
        listener.close()
        transaction.rollback()
        transaction.set_autocommit(True)


def test_one_statement_notifies_for_several_queues(manual):
    with CaptureQueriesContext(connection) as queries:
        wake.wake("default", ["mail", "default", "mail"])
        wake.wake("default", [])
    [sent] = queries
    assert "pg_notify" in sent["sql"]
    assert "mail" in sent["sql"]
    assert "default" in sent["sql"]
