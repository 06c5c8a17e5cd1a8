"""No second task with the same unique key: while the first waits, while it is unfinished, for a period."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.errors import DuplicateTask
from django_pglock.models import RateLimit, Task, Waiter
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import insert_tasks as call_module
from django_pglock.store import operate
from django_pglock.store.outcome import Failed, Failure, Retried, Succeeded
from django_pglock.store.release import release
from django_pglock.store.settle import settle
from django_pglock.tasks import fields
from django_pglock.tasks.compat import task_enqueued
from django_pglock.tasks.options import Unique
from tests import server_clock
from tests.db.store.endings import statuses
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

FAILURE = Failure("builtins.ValueError", "Traceback …")


def settle_one(claim, outcome):
    return settle("default", [(claim, outcome)], claim.worker)


def test_an_equal_unique_call_returns_the_waiting_task():
    first = keyed.refresh.enqueue(1)
    assert keyed.refresh.enqueue(number=1).id == first.id, "the same arguments, however they are passed"
    with CaptureQueriesContext(connection) as queries:
        assert keyed.refresh.enqueue(2).id != first.id
    assert len([query for query in queries if "pg_notify" not in query["sql"]]) == 1
    assert Task.objects.count() == 2


def test_only_a_new_task_sends_the_enqueued_signal():
    receiver = mock.Mock()
    task_enqueued.connect(receiver)
    first, again = keyed.refresh.enqueue(1), keyed.refresh.enqueue(1)
    task_enqueued.disconnect(receiver)
    assert [call.kwargs["task_result"].id for call in receiver.call_args_list] == [first.id] == [again.id]


@pytest.mark.parametrize(("is_inside", "free"), [(True, 0), (False, 1)])
def test_a_waiting_task_returned_inside_a_transaction_is_locked_until_the_commit(is_inside, free):
    """The task must run after the changes of this transaction are committed."""
    first = keyed.refresh.enqueue(1)
    other = dedicated_connection("default")
    try:
        with transaction.atomic() if is_inside else nullcontext(), other.cursor() as cursor:
            assert keyed.refresh.enqueue(1).id == first.id
            cursor.execute("SELECT id FROM django_pglock_task FOR NO KEY UPDATE SKIP LOCKED")
            assert len(cursor.fetchall()) == free
    finally:
        other.close()


def test_enqueue_many_writes_nothing_if_one_unique_call_is_refused():
    raising = keyed.refresh.using(unique=Unique(on_conflict="raise"))
    raising.enqueue(2)
    with pytest.raises(DuplicateTask):
        enqueue_many(raising, [(1,), (2,)])
    assert Task.objects.count() == 1


def test_a_unique_call_after_the_claim_enqueues_another_task(claim):
    """Another run processes changes after the begin of the first run, so no change is missed."""
    first = keyed.refresh.enqueue(1)
    [running] = claim()
    second = keyed.refresh.enqueue(1)
    assert second.id != first.id
    settle_one(running, Retried(FAILURE, 0))
    assert Task.objects.filter(status="READY").count() == 2, "its retry meets no conflict"


def test_a_call_that_is_unique_until_finished_returns_the_running_task(claim):
    first = keyed.rebuild.enqueue(1)
    [running] = claim()
    assert keyed.rebuild.enqueue(1).id == first.id
    settle_one(running, Succeeded())
    assert keyed.rebuild.enqueue(1).id != first.id


def test_a_call_that_is_unique_for_a_period_is_refused_also_after_success(claim):
    first = keyed.remind.enqueue(1)
    settle_one(claim()[0], Succeeded())
    with pytest.raises(DuplicateTask, match=first.id) as refused:
        keyed.remind.enqueue(1)
    assert refused.value.result_id == first.id
    Task.objects.update(unique_until=Now())
    assert keyed.remind.enqueue(1).id != first.id


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_unique_period_lasts_twice_as_long_at_most_although_the_clock_was_put_back(in_transaction):
    """A date that is further away than the period is from before the step."""
    first = keyed.remind.enqueue(1)
    length = Task.objects.values_list(F("unique_until") - F("enqueued_at"), flat=True).get().total_seconds()
    server_clock.put_back(0.9 * length)
    with transaction.atomic() if in_transaction else nullcontext():
        with pytest.raises(DuplicateTask):
            keyed.remind.enqueue(1)
        server_clock.put_back(0.9 * length)
        assert keyed.remind.enqueue(1).id != first.id


@pytest.mark.parametrize("unique", [Unique("{number}"), Unique("{number}", while_="unfinished")])
def test_an_expired_unique_period_does_not_block_calls_without_a_period(claim, unique):
    """The period was removed from the code meanwhile."""
    period = Unique("{number}", period=60)
    first = keyed.remind.using(unique=period).enqueue(1)
    settle_one(claim()[0], Failed(FAILURE))
    call = keyed.remind.using(unique=unique)
    assert call.enqueue(1).id == first.id
    Task.objects.update(unique_until=Now())
    assert call.enqueue(1).id != first.id


def test_only_tasks_with_an_expired_unique_period_lose_their_unique_key(claim):
    """Another task may have the same key: a task that has begun keeps its key for a retry by hand."""
    task = keyed.remind.using(unique=Unique("{number}"))
    begun = task.enqueue(1)
    claim()
    period = keyed.remind.enqueue(1)
    other = keyed.remind.enqueue(2)
    with pytest.raises(DuplicateTask) as refused:
        keyed.remind.enqueue(1)
    assert refused.value.result_id == period.id, "not the one that has begun"
    Task.objects.update(unique_until=Now())
    keyed.remind.enqueue(1)
    freed = Task.objects.filter(unique_key=None)
    assert [str(each.pk) for each in freed] == [period.id]
    assert Task.objects.filter(pk__in=[begun.id, other.id]).count() == 2


def test_replace_writes_the_new_call_into_the_waiting_task(claim):
    first = keyed.save.enqueue(1, text="old")
    second = keyed.save.using(priority=7, run_after=timedelta(hours=1)).enqueue(1, text="new")
    row = Task.objects.get()
    assert str(row.pk) == first.id == second.id
    assert (row.kwargs["text"], row.priority, row.status) == ("new", 7, "SCHEDULED")
    assert second.kwargs == {"text": "new"}
    keyed.save.enqueue(1, text="now")
    assert Task.objects.get().status == "READY"
    claim()
    keyed.save.enqueue(1, text="later")
    assert [row.kwargs["text"] for row in Task.objects.order_by("id")] == ["now", "later"]


ANEW = {
    "atomic": True,
    "backend": "other",
    "concurrency": 3,
    "expires": 60.0,
    "fair": "{number}",
    "keep_result": 60,
    "lock": "save:{number}",
    "max_attempts": 7,
    "max_snoozes": 2,
    "on_failure": tasks.echo,
    "meta": {"trace": "new"},
    "priority": 7,
    "queue_name": "special",
    "rate": None,
    "run_after": timedelta(hours=1),
    "timeout": 5,
    "unique": Unique("{number}", on_conflict="replace"),
}


def columns(row):
    """Return the fields that a call sets, without the id and the date of enqueueing."""
    return {name: value for name, value in vars(row).items() if name not in ("_state", "id", "enqueued_at")}


@pytest.mark.parametrize(
    "first", [{}, {"lock": "a", "concurrency": 2, "keep_result": 5, "fair": "b", "max_attempts": 3}]
)
@pytest.mark.parametrize("then", [{}, ANEW, {"rate": "10/s"}, {"run_after": timedelta()}])
def test_a_replaced_task_has_all_options_of_the_new_call(settings, first, then):
    """Otherwise the task would keep options of the first call, which is hard to notice."""
    settings.TASKS = {**settings.TASKS, "other": settings.TASKS["default"]}
    assert set(ANEW) == set(fields.OF_CALL) - {"after", "after_ended"}
    new = keyed.save.using(**then)
    fresh = Task.objects.get(pk=new.enqueue(1, text="new").id)
    Task.objects.all().delete()
    RateLimit.objects.all().delete()
    replaced = keyed.save.using(**first).enqueue(1, text="old")
    assert new.enqueue(1, text="new").id == replaced.id
    row = Task.objects.get()
    if fresh.run_after is not None:
        assert row.run_after - fresh.run_after < timedelta(minutes=1)
        row.run_after = fresh.run_after
    assert columns(row) == columns(fresh)


def test_a_replaced_task_drops_the_dependencies_of_the_first_call(claim):
    awaited = keyed.refresh.enqueue(1)
    keyed.save.using(after=[awaited], unique=Unique("{number}")).enqueue(1, text="old")
    keyed.save.enqueue(1, text="new")
    row = Task.objects.get(kwargs__text="new")
    assert (row.status, row.waits_for, Waiter.objects.count()) == ("READY", 0, 0)
    settle_one(claim(1)[0], Failed(FAILURE))
    release("default", [int(awaited.id)])
    assert Task.objects.get(pk=row.pk).status == "READY"


@pytest.mark.parametrize("unique", [Unique("{number}", while_="unfinished"), Unique("{number}", period=60)])
def test_a_task_that_is_unique_beyond_its_wait_is_not_replaced(unique):
    """The task was enqueued by other code."""
    first = keyed.save.using(unique=unique).enqueue(1, text="old")
    with (
        CaptureQueriesContext(connection) as queries,
        pytest.raises(DuplicateTask, match="cannot replace it") as refused,
    ):
        keyed.save.enqueue(1, text="new")
    assert refused.value.result_id == first.id
    assert len(queries) < 10


@pytest.mark.parametrize("lock", [None, "order:{text}"])
def test_a_replaced_task_leaves_the_queue_of_its_old_lock_key(lock):
    keyed.save.using(lock="order:{text}").enqueue(1, text="a")
    keyed.step.enqueue("a")
    keyed.save.using(lock=lock).enqueue(1, text="b")
    assert statuses() == ["READY", "READY"]


@pytest.mark.parametrize("task", [keyed.refresh, keyed.rebuild, keyed.save], ids=["waiting", "unfinished", "replace"])
def test_sixteen_concurrent_equal_unique_calls_make_one_task(in_threads, task):
    ids = in_threads(lambda number: [task.enqueue(1).id for _ in range(3)], 16)
    assert len({each for some in ids for each in some}) == 1
    assert Task.objects.count() == 1


def test_of_sixteen_concurrent_calls_unique_for_a_period_one_succeeds(in_threads):
    def enqueue(number):
        try:
            return keyed.remind.enqueue(1).id
        except DuplicateTask as error:
            return f"refused {error.result_id}"

    answers = in_threads(enqueue, 16)
    [id_] = [each for each in answers if not each.startswith("refused")]
    assert set(answers) == {id_, f"refused {id_}"}


@pytest.mark.parametrize(("on_conflict", "text"), [("skip", "first"), ("replace", "last"), ("raise", None)])
def test_equal_unique_calls_of_one_batch_act_as_separate_calls(on_conflict, text):
    save = keyed.save.using(unique=Unique("{number}", on_conflict=on_conflict))
    calls = [{"number": 1, "text": "first"}, {"number": 2, "text": "other"}, {"number": 1, "text": "last"}]
    if text is None:
        with pytest.raises(DuplicateTask, match="Several"):
            enqueue_many(save, calls)
        assert not Task.objects.exists()
    else:
        ids = enqueue_many(save, calls)
        assert ids[0] == ids[2] != ids[1]
        assert Task.objects.get(pk=ids[0]).kwargs["text"] == text


@pytest.mark.parametrize("window", [1, 5000])
def test_retry_of_equal_unique_tasks_retries_only_the_last_one(claim, monkeypatch, window):
    """A retry whose unique key is taken must neither fail the batch nor make a second task of the key."""
    monkeypatch.setattr(operate, "WINDOW", window)
    for _ in range(2):
        keyed.rebuild.enqueue(1)
        settle_one(claim()[0], Failed(FAILURE))
    assert Task.objects.all().retry() == 1
    assert statuses() == ["FAILED", "READY"]
    assert Task.objects.all().retry() == 0


def test_unique_calls_run_in_the_order_in_which_they_were_given(claim):
    """The rows are written in the order of their keys, and their ids are drawn before that."""
    numbers = [5, 3, 9, 1, 7, 3]
    ids = enqueue_many(keyed.refresh, [(number,) for number in numbers])
    assert [each.args for each in claim(10)] == ["[5]", "[3]", "[9]", "[1]", "[7]"]
    assert [int(id_) for id_ in ids[:5]] == sorted(map(int, ids[:5]))
    assert ids[1] == ids[5]


def test_more_unique_calls_than_one_statement_writes(monkeypatch):
    monkeypatch.setattr(call_module, "BATCH", 3)
    ids = enqueue_many(keyed.refresh, (number % 7 for number in range(10)))
    assert len(set(ids)) == Task.objects.count() == 7
    assert ids[:7] == sorted(ids[:7], key=int)
    assert ids[7:] == ids[:3]
