"""The INSERTs of one call and of many."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db


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
