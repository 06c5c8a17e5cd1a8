"""Settling: one guarded statement for a batch, and nothing for whoever lost the claim."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.db.utils import IntegrityError
from django.test.utils import CaptureQueriesContext

from django_pglock.errors import ClaimLost
from django_pglock.models import Attempt, Task
from django_pglock.store.claim import claim_statement
from django_pglock.store.outcome import Abandoned, Failed, Failure, Interrupted, Released, Retried, Succeeded
from django_pglock.store.settle import settle, settle_and_commit
from django_pglock.tasks.claim import date_of
from django_pglock.tasks.states import MOVES, TaskStatus
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db

FAILURE = Failure("builtins.ValueError", "Traceback …")


def settle_one(claim, outcome):
    return settle("default", [(claim, outcome)], claim.worker)


def test_order_is_priority_then_first_come_first_served(claim):
    ids = [tasks.nothing.using(priority=priority).enqueue().id for priority in (0, 5, -5, 5)]
    assert [str(each.id) for each in claim(4)] == [ids[1], ids[3], ids[0], ids[2]]


def test_only_known_functions_are_claimed():
    """A rolling deploy must not burn an attempt on a task from the future."""
    tasks.nothing.enqueue()
    Task.objects.create(queue="default", backend="default", task_path="shop.tasks.not_deployed_yet")
    statement = claim_statement("default", worker=uuid4(), paths=["tests.sample.tasks.nothing"])
    assert len(statement.execute(10, "default")) == 1
    assert Task.objects.get(task_path="shop.tasks.not_deployed_yet").attempts == 0


@pytest.mark.parametrize(
    ("outcome", "status", "record"),
    [
        (Succeeded('{"a": 1}'), "SUCCESSFUL", None),
        (Failed(FAILURE), "FAILED", "FAILED"),
        (Retried(FAILURE, 60), "SCHEDULED", "FAILED"),
        (Retried(FAILURE, 0), "READY", "FAILED"),
        (Interrupted(FAILURE, 60), "SCHEDULED", "LOST"),
        (Released(), "READY", None),
        (Abandoned(60), "SCHEDULED", None),
    ],
)
def test_each_outcome_leads_where_it_says_and_leaves_its_record(claim, outcome, status, record):
    tasks.nothing.enqueue()
    [mine] = claim()
    assert mine.id in settle_one(mine, outcome)
    row = Task.objects.get()
    assert row.status == status
    assert (row.finished_at is not None) == (status in ("SUCCESSFUL", "FAILED"))
    assert (row.worker is None) == (status in ("READY", "SCHEDULED"))
    assert row.retries == isinstance(outcome, Retried)
    assert row.rescues == 0, "only the death of a worker is one"
    assert [attempt.outcome for attempt in Attempt.objects.all()] == ([record] if record else [])
    if status == "SUCCESSFUL":
        assert row.result == {"a": 1}
    if record:
        attempt = Attempt.objects.get()
        assert (attempt.number, attempt.worker, attempt.exception_path) == (1, mine.worker, "builtins.ValueError")


def test_a_claim_given_back_unused_has_never_started(claim):
    tasks.nothing.enqueue()
    settle_one(claim()[0], Released())
    row = Task.objects.get()
    assert (row.started_at, row.attempts) == (None, 1), "the token only grows"


@pytest.mark.parametrize(
    "outcome", [Succeeded(), Failed(FAILURE), Retried(FAILURE, 1), Interrupted(FAILURE, 0), Released()]
)
def test_a_zombie_changes_nothing(claim, outcome):
    """The fence: whoever comes back after a rescue finds another attempt in the row."""
    tasks.nothing.enqueue()
    [zombie] = claim()
    settle_one(zombie, Interrupted(FAILURE, 0))
    [new] = claim()
    before = Task.objects.values().get()
    attempts = Attempt.objects.count()
    assert settle_one(zombie, outcome) == {}
    assert Task.objects.values().get() == before
    assert Attempt.objects.count() == attempts
    assert new.id in settle_one(new, Succeeded())


@pytest.mark.parametrize("outcome", [Succeeded(), Failed(FAILURE), Retried(FAILURE, 1), Released()])
def test_a_cancelled_task_stays_cancelled(claim, outcome):
    """Given back first and then cancelled: whoever had it is told by the fence. What still runs: test_cancel.py."""
    tasks.nothing.enqueue()
    [mine] = claim()
    settle_one(mine, Released())
    assert Task.objects.all().cancel() == 1
    assert settle_one(mine, outcome) == {}
    assert Task.objects.get().status == "CANCELLED"


def test_a_deleted_task_does_not_disturb_its_batch(claim):
    for _ in range(3):
        tasks.nothing.enqueue()
    first, second, third = claim(3)
    Task.objects.filter(pk=second.id).delete()
    accepted = settle("default", [(each, Succeeded()) for each in (first, second, third)], first.worker)
    assert set(accepted) == {first.id, third.id}


def test_a_batch_is_one_statement_per_kind(claim):
    for _ in range(6):
        tasks.nothing.enqueue()
    claims = claim(6)
    outcomes = [Succeeded(), Failed(FAILURE), Retried(FAILURE, 1), Succeeded(), Released(), Interrupted(FAILURE, 0)]
    with CaptureQueriesContext(connection) as queries:
        accepted = settle("default", list(zip(claims, outcomes, strict=True)), claims[0].worker)
    assert len(queries) == 2
    assert len(accepted) == 6


ROW = {"queue": "default", "backend": "default", "task_path": "x", "worker": uuid4(), "waits_for": 1}


@pytest.mark.parametrize("source", TaskStatus)
@pytest.mark.parametrize("verb", ["retry", "run_now", "cancel", "claim_update"])
def test_no_verb_makes_a_move_that_the_table_does_not_know(source, verb):
    """All pairs: whatever a verb did to a task, the table of moves allows it."""
    from django.db.models.functions import Now

    dates = {"last_attempted_at": Now(), "started_at": Now(), "run_after": Now()}
    finished = Now() if source in ("SUCCESSFUL", "FAILED", "CANCELLED") else None
    Task.objects.create(**ROW, **dates, finished_at=finished, status=source)
    if verb == "claim_update":
        Task.objects.all().ready().claim_update(1, status="RUNNING")
    else:
        getattr(Task.objects.all(), verb)()
    target = TaskStatus(Task.objects.get().status)
    assert target == source or target in MOVES[source]


@pytest.mark.parametrize(
    "broken",
    [
        {"status": "RUNNING", "worker": None},
        {"status": "SUCCESSFUL"},
        {"status": "SCHEDULED"},
        {"status": "UNHEARD_OF"},
        {"priority": 101},
    ],
)
def test_the_database_refuses_rows_that_cannot_be(broken):
    with pytest.raises(IntegrityError):
        Task.objects.create(**{**ROW, **broken})


@pytest.mark.django_db(transaction=True)
class TestInTheTasksOwnTransaction:
    def test_settling_and_the_commit_are_one_message(self, claim):
        tasks.nothing.enqueue()
        [mine] = claim()
        with transaction.atomic(durable=True), CaptureQueriesContext(connection) as queries:
            settle_and_commit("default", [(mine, Succeeded('{"a": 1}'))])
            told = [query["sql"] for query in queries if query["sql"] not in ("BEGIN", "COMMIT")]
        assert len(told) == 1
        assert told[0].endswith(";COMMIT")
        assert Task.objects.get().result == {"a": 1}

    def test_a_lost_claim_takes_the_effects_with_it(self, claim):
        tasks.nothing.enqueue()
        [zombie] = claim()
        settle_one(zombie, Interrupted(FAILURE, 0))
        with pytest.raises(ClaimLost), transaction.atomic(durable=True):
            Effect.objects.create(name="zombie")
            settle_and_commit("default", [(zombie, Succeeded())])
        assert not Effect.objects.exists()
        assert Task.objects.get().status == "READY"

    def test_one_lost_claim_of_a_group_takes_all(self, claim):
        for _ in range(2):
            tasks.nothing.enqueue()
        first, second = claim(2)
        settle_one(second, Released())
        with pytest.raises(ClaimLost), transaction.atomic(durable=True):
            settle_and_commit("default", [(first, Succeeded()), (second, Succeeded())])
        assert set(Task.objects.values_list("status", flat=True)) == {"RUNNING", "READY"}

    def test_what_is_to_happen_on_commit_happens(self, claim):
        tasks.nothing.enqueue()
        [mine] = claim()
        heard = []
        with transaction.atomic(durable=True):
            transaction.on_commit(lambda: heard.append(1))
            settle_and_commit("default", [(mine, Succeeded())])
        assert heard == [1]
        assert connection.get_autocommit()

    def test_a_transaction_that_is_to_be_rolled_back_is_not_committed(self, claim):
        tasks.nothing.enqueue()
        [mine] = claim()
        with pytest.raises(transaction.TransactionManagementError), transaction.atomic(durable=True):
            Effect.objects.create(name="x")
            transaction.set_rollback(True)
            settle_and_commit("default", [(mine, Succeeded())])
        assert not Effect.objects.exists()


@pytest.mark.parametrize("attempt", [1, 2])
def test_dates_of_a_claim_are_those_of_the_row_to_the_microsecond(claim, attempt):
    tasks.nothing.using(run_after=timedelta(seconds=0)).enqueue()
    for _ in range(attempt):
        Task.objects.update(status="READY")
        [mine] = claim()
    row = Task.objects.get()
    names = ("run_after", "enqueued_at", "started_at", "last_attempted_at")
    assert {name: mine.date(name) for name in names} == {name: getattr(row, name) for name in names}
    accepted = settle_one(mine, Succeeded())
    assert date_of(accepted[mine.id]) == Task.objects.get().finished_at
