"""The parts of the store that need no database: calls, buckets, columns of claims, methods of querysets."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from datetime import datetime, timedelta, timezone

import pytest
from django.db.models import QuerySet

from django_pglock import task as task_
from django_pglock.errors import TaskArgumentsError
from django_pglock.models import Number, Queue, Task
from django_pglock.store import insert_tasks as module
from django_pglock.store.insert_tasks import Call, batches, due_of, is_alone, meta_of
from django_pglock.store.numbers import BOUNDS, BUCKETS, bucket_of, quantile
from django_pglock.store.statements import CLAIM_COLUMNS, DATES
from django_pglock.tasks.claim import Claim
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Letter


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (3, [3]), (4, [4]), (9, [4, 4, 1])])
def test_a_batch_has_so_many_calls(monkeypatch, count, sizes):
    monkeypatch.setattr(module, "BATCH", 4)
    calls = [Call(f"[{number}]", "{}") for number in range(count)]
    found = list(batches(iter(calls)))
    assert [len(each) for each in found] == sizes
    assert [call for batch in found for call in batch] == calls


def test_a_batch_is_full_when_its_arguments_are_long(monkeypatch):
    monkeypatch.setattr(module, "LARGEST_BATCH", 100)
    calls = [Call("[]", "x" * size) for size in (60, 60, 200, 1)]
    assert [len(each) for each in batches(calls)] == [2, 1, 1]
    # The first call of each batch has 48 characters, the second one the rest: with 100 it is not full, with 101 it is.
    calls = [Call("[]", "x" * size) for size in (46, 50, 1, 98, 1, 1)]
    assert [len(each) for each in batches(calls)] == [3, 2, 1]


def test_calls_are_taken_only_as_they_are_written():
    """The calls may come from a generator whose items do not fit into memory."""
    taken = []
    calls = (taken.append(number) or Call("[]", "{}") for number in range(3 * module.BATCH))
    next(batches(calls))
    assert len(taken) == module.BATCH


@pytest.mark.usefixtures("own_registry")
def test_meta_has_the_values_without_a_column():
    assert meta_of(tasks.nothing) == "{}"
    task = tasks.nothing.using(meta={"tenant": 5})
    assert json.loads(meta_of(task)) == {"tenant": 5}
    assert json.loads(meta_of(task, {"traceparent": "a"})) == {"tenant": 5, module.HEADERS: {"traceparent": "a"}}
    assert json.loads(meta_of(task_(redact=("value",))(tasks.echo.func))) == {"redact": ["value"]}
    options = keyed.drip.using(timeout=5, after=[3], meta={"tenant": 5})
    interval, portion = options.rate.interval, options.rate.portion
    assert json.loads(meta_of(options)) == {
        "tenant": 5, "options": {"timeout": 5}, "rate": [interval, portion], "after": [3],
    }  # fmt: skip
    with pytest.raises(TaskArgumentsError, match="The meta of"):
        meta_of(tasks.nothing.using(meta={"bad": {1, 2}}))


def test_a_call_is_due_at_a_date_or_after_a_delay():
    date = datetime(2100, 1, 1, tzinfo=timezone.utc)
    assert due_of(tasks.nothing) == (None, None)
    assert due_of(tasks.nothing.using(run_after=date)) == (date, None)
    assert due_of(tasks.nothing.using(run_after=timedelta(hours=1))) == (None, timedelta(hours=1))
    assert due_of(keyed.gather) == (None, timedelta(seconds=0.2)), "the first call waits for others"
    assert due_of(keyed.gather.using(run_after=date)) == (date, None)
    assert due_of(keyed.digest) == (None, None)


def test_a_call_has_an_exclusive_key_unless_its_concurrency_is_above_one():
    assert is_alone(tasks.nothing)
    assert is_alone(keyed.step)
    assert not is_alone(keyed.step.using(lock="key", concurrency=2))


# The buckets of durations, and the quantiles that follow from them.


def counted(values):
    counts = [0] * BUCKETS
    for value in values:
        counts[bucket_of(value)] += 1
    return counts


def test_buckets_of_stored_rows_never_change():
    assert (BUCKETS, BOUNDS[0], BOUNDS[2], BOUNDS[20]) == (62, 0.001, 0.002, 1.024)
    assert BOUNDS[-1] == pytest.approx(12.4 * 86_400, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(-1.0, 0), (0.0, 0), (0.001, 0), (0.00101, 1), (1.024, 20), (1.03, 21), (1e9, 61)]
)
def test_a_duration_belongs_to_the_bucket_of_the_next_bound(seconds, bucket):
    assert bucket_of(seconds) == bucket


@pytest.mark.parametrize("share", [0.01, 0.5, 0.95, 1.0])
def test_quantile_is_within_a_bucket_of_the_truth(share):
    values = sorted(random.Random(7).lognormvariate(0, 2) for _ in range(5000))
    truth = values[min(len(values) - 1, round(share * len(values)))]
    assert truth / 1.42 < quantile(counted(values), share) < truth * 1.42


def test_quantiles_of_no_values_of_few_and_of_values_above_all_bounds():
    assert quantile([], 0.5) is None
    assert quantile([0] * BUCKETS, 0.5) is None
    assert 0 < quantile(counted([0.0002]), 0.5) <= 0.001
    assert quantile(counted([0.0002]), 1.0) == BOUNDS[0]
    assert quantile([0, 0, 4], 1.0) == pytest.approx(BOUNDS[2])
    assert quantile(counted([1e9]), 0.5) >= BOUNDS[-1]


# The columns of a claim are the fields of ``Claim``, in their order.


def test_the_columns_are_the_fields_of_a_claim():
    names = [each.name for each in fields(Claim)]
    assert names[:3] == ["id", "attempt", "worker"]
    assert set(DATES) < set(CLAIM_COLUMNS)
    assert ["id", "attempts", *names[3 : len(CLAIM_COLUMNS) + 1]] == list(CLAIM_COLUMNS)


# A queryset of this package extends that of Django and hides none of its methods.


def test_no_method_hides_one_of_django_including_its_private_ones():
    """``bulk_create`` calls ``_insert``, for one, and only on some versions."""
    for model in (Task, Letter):
        ours = [each for each in type(model.objects.all()).__mro__ if each.__module__.startswith("django_pglock")]
        assert ours
        assert [name for each in ours for name in vars(each) if name[:2] != "__" and hasattr(QuerySet, name)] == []


@pytest.mark.parametrize("name", ["claim_each", "claim_update"])
def test_tasks_change_their_status_only_by_verbs_of_tasks(name):
    """``claim_update(1, status="SUCCESSFUL")`` would release neither the lock key nor the tasks that wait for it."""
    assert hasattr(Letter.objects.all(), name)
    assert not hasattr(Task.objects, name)
    assert not hasattr(Task.objects.all(), name)
    assert hasattr(Task.objects.all(), "claim")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Task, ["unknown", "queue_counts", "failures"]),
        (Queue, ["pause", "resume"]),
        (Number, ["series", "totals"]),
    ],
)
def test_what_reads_a_whole_database_is_no_method_of_a_queryset(model, names):
    """``filter(queue="mail").failures()`` would return the failures of all queues."""
    other = model.objects.db_manager("other")
    assert [name for name in names if not hasattr(other, name)] == []
    assert [name for name in names if hasattr(model.objects.filter(pk=1), name)] == []
    assert other.db == "other"
