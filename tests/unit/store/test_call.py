"""The row of a call."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest

from django_pglock import task as task_
from django_pglock.errors import TaskArgumentsError
from django_pglock.store import call as module
from django_pglock.store.call import Call, batches, due_of, is_alone, meta_of, row_of
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks


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


def test_a_result_is_kept_for_whole_seconds():
    assert row_of(tasks.nothing.using(keep_result=timedelta(minutes=2)), Call("[]", "{}"), "{}")["keep_result"] == 120


def test_a_call_has_an_exclusive_key_unless_its_concurrency_is_above_one():
    assert is_alone(tasks.nothing)
    assert is_alone(keyed.step)
    assert not is_alone(keyed.step.using(lock="key", concurrency=2))
