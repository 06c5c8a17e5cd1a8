"""A task runs again from one of its steps: the record of that step and all later ones are deleted."""

from __future__ import annotations

import pytest
from django.db import transaction
from django.db.models.functions import Now

from django_pglock.models import Step, Task
from django_pglock.store.operate import run_again_from
from django_pglock.testing import run_tasks
from tests.db.store.test_prune import make
from tests.sample import step_tasks

pytestmark = pytest.mark.django_db(transaction=True)


def with_steps(status, **fields):
    task = make(status, days=0, **fields)
    for number, name in enumerate("abc", 1):
        Step.objects.create(task=task, name=name, number=number, kind="STEP", attempt=1, started_at=Now())
    return task.pk


def state(task_id):
    names = Step.objects.filter(task=task_id).order_by("number").values_list("name", flat=True)
    return Task.objects.get(pk=task_id).status, "".join(names)


@pytest.mark.parametrize(
    ("status", "then"),
    [("FAILED", "READY"), ("CANCELLED", "READY"), ("SCHEDULED", "READY"), ("READY", "READY"), ("BLOCKED", "BLOCKED")],
)
def test_the_step_and_all_later_ones_are_forgotten(status, then):
    task_id = with_steps(status)
    assert sorted(run_again_from("default", task_id, "b")) == ["b", "c"]
    assert state(task_id) == (then, "a")


@pytest.mark.parametrize("status", ["RUNNING", "SUCCESSFUL"])
def test_a_task_that_runs_or_has_succeeded_keeps_its_steps(status):
    task_id = with_steps(status)
    assert run_again_from("default", task_id, "b") == []
    assert state(task_id) == (status, "abc")


def test_a_task_that_waits_for_others_keeps_its_steps():
    task_id = with_steps("BLOCKED", waits_for=1)
    assert run_again_from("default", task_id, "b") == []
    assert state(task_id) == ("BLOCKED", "abc")


def test_a_task_whose_unique_key_another_one_has_keeps_its_steps():
    make("READY", unique_key="k", unique_scope="UNFINISHED")
    task_id = with_steps("FAILED", unique_key="k", unique_scope="UNFINISHED")
    assert run_again_from("default", task_id, "b") == []
    assert state(task_id) == ("FAILED", "abc")


def test_a_name_that_is_not_recorded_changes_nothing():
    task_id = with_steps("FAILED")
    assert run_again_from("default", task_id, "z") == []
    assert state(task_id) == ("FAILED", "abc")


def test_no_worker_claims_the_task_between_the_two_changes(claim, in_threads):
    """Otherwise it would run with the old records, and write new ones beside them."""
    task_id = with_steps("READY", worker=None)
    with transaction.atomic():
        run_again_from("default", task_id, "b")
        assert in_threads(lambda _: claim(), 1) == [[]]
    assert [each.id for each in claim()] == [task_id]
    assert run_again_from("default", task_id, "a") == []


def test_two_people_at_once_run_it_once(in_kept_threads):
    task_id = with_steps("FAILED")
    found = in_kept_threads(lambda _: run_again_from("default", task_id, "b"), 4)
    assert sorted(map(len, found)) == [0, 0, 0, 2]


def test_the_function_runs_the_step_again_and_keeps_the_ones_before_it():
    step_tasks.CALLS.clear()
    result = step_tasks.order.enqueue(7)
    run_tasks(until="due")
    run_again_from("default", int(result.id), "book")
    run_tasks(until="due")
    assert step_tasks.CALLS == ["charge", "book", "book"]
