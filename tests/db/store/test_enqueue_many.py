"""Many calls at once."""

from __future__ import annotations

import asyncio
import tracemalloc
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock import aenqueue_many, enqueue_many
from django_pglock.errors import TaskArgumentsError
from django_pglock.models import Task, Worker
from django_pglock.tasks.compat import BaseTaskBackend, InvalidTask, task_backends
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


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


@pytest.mark.parametrize("calls", [{"name": "a"}, "abc", b"abc", 5, None])
def test_a_single_call_is_not_taken_apart(calls):
    """Iterating a dict gives its keys, and iterating a text its letters."""
    with pytest.raises(TaskArgumentsError, match=f"given a {type(calls).__name__}; give a list"):
        enqueue_many(tasks.record, calls)
    assert not Task.objects.exists()


def test_one_statement_writes_five_thousand():
    with transaction.atomic(), CaptureQueriesContext(connection) as queries:
        ids = enqueue_many(tasks.nothing, range(12_000))
    inserts = [query for query in queries.captured_queries if "INSERT" in query["sql"]]
    assert (len(inserts), len(ids)) == (3, 12_000)
    assert [int(each) for each in ids] == sorted(map(int, ids))
    first, last = Task.objects.order_by("id").first(), Task.objects.order_by("id").last()
    assert (first.args, last.args) == ([0], [11_999])


def test_all_or_none():
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


def test_memory_is_that_of_a_batch():
    """A hundred thousand calls of a kilobyte each are 100 MB; a batch is five."""
    tracemalloc.start()
    try:
        enqueue_many(tasks.nothing, ("x" * 1000 for _ in range(30_000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 35_000_000
    assert Task.objects.count() == 30_000


def test_delayed_calls_are_scheduled():
    enqueue_many(tasks.nothing.using(run_after=timedelta(hours=1)), [1, 2])
    assert set(Task.objects.values_list("status", flat=True)) == {"SCHEDULED"}


def test_a_sleeping_worker_is_woken(worker, eventually):
    worker()
    eventually(lambda: Worker.objects.filter(is_sleeping=True).exists())
    enqueue_many(tasks.record, [("many", number) for number in range(50)])
    eventually(lambda: Effect.objects.filter(name="many").count() == 50)


def test_from_a_coroutine():
    async def main():
        try:
            return await aenqueue_many(tasks.nothing, [1, 2, 3])
        finally:
            await sync_to_async(connections.close_all)()

    assert len(asyncio.run(main())) == 3


IMMEDIATE = BaseTaskBackend.__module__.replace(".base", ".immediate.ImmediateBackend")


@override_settings(TASKS={"default": {"BACKEND": IMMEDIATE}})
def test_on_djangos_own_backends_each_is_enqueued():
    enqueue_many(tasks.record, [("now", 1), ("now", 2)])
    assert Effect.objects.filter(name="now").count() == 2


def test_a_task_of_another_backend_is_refused():
    class Foreign:
        module_path = "a.b"

    with pytest.raises(InvalidTask, match="not a task of this backend"):
        task_backends["default"].enqueue_many(Foreign(), [1])
