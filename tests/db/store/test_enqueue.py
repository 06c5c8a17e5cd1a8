"""Enqueueing: in the caller's transaction, checked before it is written."""

from __future__ import annotations

import asyncio
import tracemalloc
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from django.db import IntegrityError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils.timezone import now

from django_pglock import Unique, aenqueue_many, enqueue_many
from django_pglock.errors import TaskArgumentsError, TaskOptionError
from django_pglock.models import Task
from django_pglock.store import enqueue as enqueue_module
from django_pglock.store import insert_tasks as call_module
from django_pglock.store.outcome import Succeeded
from django_pglock.store.settle import settle
from django_pglock.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_backends,
    task_enqueued,
)
from tests.db.store.endings import statuses
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db


def test_a_row_has_the_options_of_the_call():
    result = tasks.record.using(priority=7, queue_name="mail", max_attempts=4).enqueue("ann", number=3)
    row = Task.objects.get(pk=result.id)
    assert (row.status, row.queue, row.priority, row.max_retries, row.attempts) == ("READY", "mail", 7, 3, 0)
    assert (row.task_path, row.args, row.kwargs) == ("tests.sample.tasks.record", ["ann"], {"number": 3})
    assert result.status == TaskResultStatus.READY
    assert result.enqueued_at == row.enqueued_at


@pytest.mark.django_db(transaction=True)
def test_an_enqueued_task_is_rolled_back_with_the_transaction():
    """With a broker, a task may be sent for an order whose transaction is rolled back."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        Effect.objects.create(name="order")
        tasks.record.enqueue("receipt")
        1 / 0  # noqa: B018
    assert not Task.objects.exists()


def test_a_task_for_later_is_scheduled_by_the_servers_clock():
    soon = tasks.nothing.using(run_after=timedelta(hours=1)).enqueue()
    fixed = tasks.nothing.using(run_after=datetime(2100, 1, 1, tzinfo=timezone.utc)).enqueue()
    past = tasks.nothing.using(run_after=timedelta(seconds=-1)).enqueue()
    row = Task.objects.get(pk=soon.id)
    assert row.status == "SCHEDULED"
    assert row.run_after - row.enqueued_at == timedelta(hours=1)
    assert Task.objects.get(pk=fixed.id).run_after.year == 2100
    assert Task.objects.get(pk=past.id).status == "READY"
    assert soon.status == TaskResultStatus.READY, "django.tasks knows no SCHEDULED"


def test_queue_names_that_look_like_sql_are_stored_unchanged():
    name = """mail'; DROP TABLE "django_pglock_task"; -- %s %(x)s \\ \u202e"""
    result = tasks.nothing.using(queue_name=name).enqueue(name)
    row = Task.objects.get(pk=result.id)
    assert (row.queue, row.args) == (name, [name])


@pytest.mark.parametrize("zone", [timezone.utc, timezone(timedelta(hours=-5))])
def test_a_date_that_python_cannot_read_in_each_time_zone_is_refused_by_the_table(zone):
    for date in (datetime.min, datetime.max):
        with pytest.raises(IntegrityError, match="pglock_task_run_after"), transaction.atomic():
            tasks.echo.using(run_after=date.replace(tzinfo=zone)).enqueue(1)
    for date in (datetime(1, 1, 3), datetime(9999, 12, 29)):
        tasks.echo.using(run_after=date.replace(tzinfo=zone)).enqueue(1)


def test_an_option_of_a_single_call_is_stored_in_the_row():
    result = tasks.record.using(atomic=True).enqueue("once")
    assert Task.objects.get(pk=result.id).meta == {"options": {"atomic": True}}
    assert Task.objects.get(pk=tasks.record_atomically.enqueue("x").id).meta == {}


@pytest.mark.parametrize("use_tz", [True, False])
def test_dates_are_what_use_tz_says_however_they_are_asked_for(use_tz):
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Tokyo"):
        result = tasks.echo.enqueue(1)
        assert result.enqueued_at == task_backends["default"].get_result(result.id).enqueued_at
        assert abs(now() - result.enqueued_at) < timedelta(minutes=5)


def test_a_result_can_be_fetched_by_id_and_only_by_id():
    backend = task_backends["default"]
    result = tasks.echo.enqueue(1)
    assert backend.get_result(result.id).task.module_path == "tests.sample.tasks.echo"
    for unknown in ("0", "-1", "abc", "", "9" * 30, "١", "1; DROP TABLE x"):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(unknown)


def test_a_row_with_an_unknown_function_imports_nothing():
    """A row must not be able to name a module to import."""
    row = Task.objects.create(queue="default", backend="default", task_path="antigravity.fly")
    with pytest.raises(TaskResultDoesNotExist, match="has not imported"):
        task_backends["default"].get_result(str(row.pk))


def test_the_signal_names_the_backends_class_as_its_sender():
    heard = []

    def hear(sender, task_result, **kwargs):
        heard.append((sender, task_result.id))

    task_enqueued.connect(hear)
    try:
        result = tasks.nothing.enqueue()
        enqueue_many(tasks.nothing, [()])
    finally:
        task_enqueued.disconnect(hear)
    assert heard == [(type(task_backends["default"]), result.id)]


def deep(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "it is an object"),
        ("a\x00b", "NUL"),
        ("x" * 10_000_000, "10,000,002 bytes long, more than 1,048,576"),
        (deep(100_000), "nested too deeply"),
    ],
    ids=["no JSON", "NUL", "10 MB", "too deep"],
)
@pytest.mark.parametrize("how", ["enqueue", "enqueue_many", "enqueue_on_commit"])
def test_invalid_arguments_are_refused_before_anything_is_written(value, words, how):
    from django_pglock import enqueue_many

    with pytest.raises(TaskArgumentsError, match=f"^Argument .value. of tests.sample.tasks.echo .*{words}"):
        if how == "enqueue_many":
            enqueue_many(tasks.echo, [1, (value,)])
        else:
            getattr(tasks.echo, how)(value)
    assert not Task.objects.exists()


def test_a_validated_task_is_validated_again_after_a_change_of_the_settings(settings):
    """The result of the validation is cached for the backend that has validated the task."""
    mail = tasks.echo.using(queue_name="mail")
    mail.enqueue(1)
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default"]}}
    with pytest.raises(InvalidTask, match="mail"):
        mail.enqueue(2)
    assert Task.objects.count() == 1


def test_each_call_is_a_row_and_they_run_in_order():
    ids = enqueue_many(
        tasks.record.using(priority=7, queue_name="mail", max_attempts=4), [{"name": "a", "number": 1}, ("b", 2), "c"]
    )
    rows = list(Task.objects.order_by("id"))
    assert [str(row.pk) for row in rows] == ids
    assert [(row.args, row.kwargs) for row in rows] == [([], {"name": "a", "number": 1}), (["b", 2], {}), (["c"], {})]
    assert {(row.status, row.priority, row.queue, row.max_retries) for row in rows} == {("READY", 7, "mail", 3)}
    assert tasks.record.get_result(ids[1]).args == ["b", 2]
    assert enqueue_many(tasks.record, []) == []


@pytest.mark.parametrize("calls", [{"name": "a"}, "abc", b"abc", 5, None])
def test_enqueue_many_refuses_a_dict_or_a_text_instead_of_a_list(calls):
    """Iterating a dict gives its keys, and iterating a text its letters."""
    with pytest.raises(TaskArgumentsError, match=rf"given an? {type(calls).__name__}; give a list"):
        enqueue_many(tasks.record, calls)
    assert not Task.objects.exists()


def test_enqueue_many_writes_no_task_if_one_call_is_invalid():
    def calls():
        yield from range(5_000)
        yield {"bad": {1, 2}}

    with pytest.raises(TaskArgumentsError, match="set"):
        enqueue_many(tasks.nothing, calls())
    assert not Task.objects.exists()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        enqueue_many(tasks.nothing, [1])
        1 / 0  # noqa: B018
    assert not Task.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_enqueue_many_needs_only_the_memory_of_a_batch(monkeypatch):
    """All calls are 8 MB, and a batch is one."""
    monkeypatch.setattr(call_module, "BATCH", 500)
    tracemalloc.start()
    try:
        enqueue_many(tasks.nothing, ("x" * 1000 for _ in range(6000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000
    assert Task.objects.count() == 6000


@pytest.mark.django_db(transaction=True)
def test_aenqueue_many_enqueues_from_a_coroutine():
    async def main():
        try:
            return await aenqueue_many(tasks.nothing, [1, 2, 3])
        finally:
            await sync_to_async(connections.close_all)()

    assert len(asyncio.run(main())) == 3


def test_a_task_of_another_backend_is_refused():
    class Foreign:
        module_path = "a.b"

    with pytest.raises(InvalidTask, match="not a task of this backend"):
        task_backends["default"].enqueue_many(Foreign(), [1])


@pytest.fixture
def woken(monkeypatch):
    """The queues for which workers are woken, and a word if parents are."""
    noted = []
    monkeypatch.setattr(enqueue_module, "wake", lambda using, queues: noted.extend(queues))
    monkeypatch.setattr(enqueue_module, "wake_parents", lambda using: noted.append("parents"))
    return noted


LATER = timedelta(hours=1)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: tasks.nothing.using(queue_name="mail").enqueue(), ["mail"]),
        (lambda: tasks.nothing.using(queue_name="mail", keep_result=5).enqueue(), ["mail"]),
        (lambda: tasks.nothing.using(queue_name="mail", run_after=LATER).enqueue(), ["parents"]),
        (lambda: enqueue_many(tasks.nothing.using(queue_name="mail"), [{}] * 2), ["mail"]),
        (lambda: enqueue_many(keyed.drip.using(queue_name="mail"), [{}] * 2), ["parents"]),
        (lambda: enqueue_many(keyed.step, [(1,), (2,)]), []),
    ],
)
@pytest.mark.django_db(transaction=True)
def test_workers_are_woken_for_what_they_can_claim_and_for_dates_that_they_have_to_read(woken, call, expected):
    with transaction.atomic():
        call()
    assert woken == expected


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("calls", [[(1,)], [(1,), (2,)], [(1,), (2,), (1,)]], ids=len)
def test_keys_are_admitted_after_the_commit(calls):
    with transaction.atomic():
        enqueue_many(keyed.step, calls)
        assert set(Task.objects.values_list("status", flat=True)) == {"BLOCKED"}
    expected = ["READY", "READY", "BLOCKED"][: len(calls)]
    assert statuses() == expected


@pytest.mark.django_db(transaction=True)
def test_a_task_after_one_that_has_ended_is_ready_after_the_commit(claim):
    awaited = tasks.nothing.enqueue()
    with transaction.atomic():
        waiting = tasks.nothing.using(after=awaited).enqueue()
        settle("default", [(claim()[0], Succeeded())], uuid4())
        assert Task.objects.get(pk=waiting.id).status == "BLOCKED"
        many = enqueue_many(tasks.nothing.using(after=awaited), [{}] * 2)
    assert {Task.objects.get(pk=id_).status for id_ in many} == {"READY"}


@pytest.mark.django_db(transaction=True)
def test_a_call_with_several_options_is_not_admitted_as_if_it_had_only_a_key():
    awaited = tasks.nothing.enqueue()
    calls = (
        (keyed.drip.using(run_after=LATER), ()),
        (keyed.step.using(after=awaited, unique=True), (1,)),
        (keyed.step.using(unique=True), (2,)),
    )
    found = [[Task.objects.get(pk=call.enqueue(*args).id) for _ in range(2)] for call, args in calls]
    assert [row.status for row, _ in found] == ["SCHEDULED", "BLOCKED", "READY"]
    assert [row == again for row, again in found] == [False, True, True]


def test_a_call_cannot_both_replace_a_task_and_wait_for_one():
    awaited = tasks.nothing.enqueue()
    replacing = {"after": awaited, "unique": Unique(on_conflict="replace")}
    with pytest.raises(TaskOptionError, match="on_conflict='replace' cannot be combined with after"):
        tasks.echo.using(**replacing)
    assert tasks.echo.using(unique=Unique(on_conflict="replace")).enqueue(1)
    assert tasks.echo.using(after=awaited, unique=True).enqueue(2)


# The INSERTs of one call and of many.


@pytest.mark.parametrize(
    ("task", "parameter", "keys"),
    [
        (keyed.step, "order_id", {"lock_key": ["order:1", "order:2"]}),
        (keyed.serve, "tenant", {"fair_key": ["1", "2"]}),
        (keyed.rebuild, "number", {"unique_key": [f"{keyed.rebuild.module_path} {number}" for number in (1, 2)]}),
        (
            keyed.digest,
            "user",
            {
                "group_key": ["mail:1", "mail:2"],
                "lock_key": [f"%group {keyed.digest.module_path} mail:{number}" for number in (1, 2)],
            },
        ),
    ],
    ids=["lock", "fair", "unique", "group"],
)
def test_each_call_has_its_own_keys_and_no_others(task, parameter, keys):
    enqueue_many(task, [{parameter: 1}, {parameter: 2}])
    for column in ("lock_key", "fair_key", "group_key", "unique_key"):
        assert list(Task.objects.order_by("id").values_list(column, flat=True)) == keys.get(column, [None, None])


def test_one_insert_writes_up_to_five_thousand_tasks():
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        ids = enqueue_many(tasks.nothing, range(12_000))
    inserts = [query for query in queries.captured_queries if "INSERT" in query["sql"]]
    assert (len(inserts), len(ids)) == (3, 12_000)
    assert [int(each) for each in ids] == sorted(map(int, ids))
    first, last = Task.objects.order_by("id").first(), Task.objects.order_by("id").last()
    assert (first.args, last.args) == ([0], [11_999])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "READY"),
        ({"run_after": timedelta(hours=1)}, "SCHEDULED"),
        ({"run_after": timedelta(hours=-1)}, "READY"),
        ({"keep_result": 60}, "READY"),
    ],
)
def test_one_call_and_many_write_the_same_row(count, changes, status):
    """The two kinds of calls use different statements."""
    call = tasks.record.using(priority=3, queue_name="mail", max_attempts=2, **changes)
    if count == 1:
        call.enqueue("a", number=1)
    else:
        enqueue_many(call, [{"name": "b", "number": 1}] * 2)
    for row in Task.objects.all():
        assert (row.status, row.queue, row.priority, row.max_retries) == (status, "mail", 3, 1)
        assert (row.args, row.kwargs) == ((["a"], {"number": 1}) if count == 1 else ([], {"name": "b", "number": 1}))
        assert row.keep_result == changes.get("keep_result")
        assert (row.lock_key, row.group_key, row.fair_key, row.unique_key) == (None, None, None, None)
        assert row.run_after == (row.enqueued_at + changes["run_after"] if "run_after" in changes else None)
