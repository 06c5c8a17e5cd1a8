"""The verbs of the admin and of ``locktasks``: each changes the tasks that its question has counted."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
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


def test_a_verb_with_a_value_is_another_verb():
    row, verb = make(), TASK_VERBS["move_to_queue"]
    given = verb.with_value("default", "other")
    with pytest.raises(ValueError, match="with_value"):
        verb.apply(Task.objects.all(), None)
    assert (verb.value, given.value) == ("", "other")
    assert given.apply(Task.objects.all(), None) == 1
    row.refresh_from_db()
    assert row.queue == "other"
