"""The verbs of the admin and of ``locktasks``: each changes the tasks that its question has counted."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now

from django_pglock.models import Task, Waiter
from django_pglock.tasks.states import TaskStatus
from django_pglock.verbs import TASK_VERBS
from tests.db.admin.visits import make

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("name", TASK_VERBS)
def test_a_verb_changes_the_tasks_in_its_statuses_and_counts_them_before(name):
    """There is one task of each status. The running one is stuck."""
    for status in TaskStatus.values:
        make(status)
    verb = TASK_VERBS[name].with_value("default", "other")
    assert set(verb.movable(Task.objects.all()).values_list("status", flat=True)) == verb.statuses
    assert verb.apply(Task.objects.all(), None) == len(verb.statuses)


def add_tasks_that_no_verb_changes():
    """Each has a status from which a verb moves tasks, and a reason why it stays."""
    for _ in range(2):
        make("FAILED", unique_key="again", unique_scope="UNFINISHED")
    make("FAILED", unique_key="taken", unique_scope="UNFINISHED")
    make("READY", unique_key="taken", unique_scope="UNFINISHED", queue="other")
    make("RUNNING", cancel_requested_at=Now())
    make("SUCCESSFUL", unique_key="x", unique_scope="PERIOD", unique_until=Now() + timedelta(hours=1))
    awaited = make("SUCCESSFUL")
    Waiter.objects.create(awaited=awaited.pk, task=make("BLOCKED", queue="other"))


@pytest.mark.parametrize("name", TASK_VERBS)
def test_a_verb_counts_no_task_that_it_does_not_change(name):
    """The admin and ``locktasks`` show the count before they ask, and the task of a large change has the ids."""
    add_tasks_that_no_verb_changes()
    for status in TaskStatus.values:
        make(status)
    verb = TASK_VERBS[name].with_value("default", "other")
    before = {row["id"]: row for row in Task.objects.values()}
    counted = set(verb.movable(Task.objects.all()).values_list("pk", flat=True))
    assert verb.apply(Task.objects.all(), None) == len(counted)
    after = {row["id"]: row for row in Task.objects.values()}
    assert {id_ for id_, row in before.items() if after.get(id_) != row} == counted


def test_a_verb_without_its_value_says_what_depends_on_it():
    """The admin asks for the queue on the page that shows the count."""
    for queue in ("default", "default", "other"):
        make(queue=queue)
    verb = TASK_VERBS["move_to_queue"]
    assert verb.message(verb.question, verb.movable(Task.objects.all()).count()) == (
        "3 waiting tasks would be moved, except those that are in that queue already."
    )
    given = verb.with_value("default", "other")
    assert given.message(given.question, given.movable(Task.objects.all()).count()) == (
        "2 waiting tasks would be moved."
    )


def test_a_verb_with_a_value_is_another_verb():
    row, verb = make(), TASK_VERBS["move_to_queue"]
    given = verb.with_value("default", "other")
    with pytest.raises(ValueError, match="with_value"):
        verb.apply(Task.objects.all(), None)
    assert (verb.value, given.value) == ("", "other")
    assert given.apply(Task.objects.all(), None) == 1
    row.refresh_from_db()
    assert row.queue == "other"
