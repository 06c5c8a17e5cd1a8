"""Common to all verbs of users: a task is moved only from the statuses that the verb names."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from django_pglock.store.move_to_status import movable, move
from django_pglock.tasks.states import FINISHED, TaskStatus
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_only_tasks_of_a_status_from_which_they_may_move_are_moved(claim):
    running, ready = (int(tasks.nothing.enqueue().id) for _ in range(2))
    claim()
    assert movable(TaskStatus.READY, FINISHED) == ["CANCELLED", "FAILED"]
    assert move(Task.objects.all(), TaskStatus.CANCELLED, {"queue": "x"}, among=FINISHED) == []
    moved = move(Task.objects.all(), TaskStatus.CANCELLED, {"queue": "x"}, among=[TaskStatus.READY])
    assert moved == [(ready, "x", "READY", None)]
    assert Task.objects.get(pk=running).queue == "default"


def test_move_skips_a_locked_row(locked):
    held, free = (int(tasks.nothing.enqueue().id) for _ in range(2))
    with locked(held):
        moved = move(Task.objects.all(), TaskStatus.CANCELLED, {"priority": 3}, among=[TaskStatus.READY])
    assert [id_ for id_, *_ in moved] == [free]
