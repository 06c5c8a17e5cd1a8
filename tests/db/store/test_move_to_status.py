"""What the verbs of people share: tasks are moved from the statuses that the verb names, some at a time."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock.models import Task
from django_pglock.store import move_to_status
from django_pglock.store.move_to_status import is_among, movable, move
from django_pglock.tasks.states import FINISHED, TaskStatus
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_many_are_moved_some_at_a_time_and_what_has_been_done_stays_done(monkeypatch):
    """A crowd in one transaction would keep workers waiting for its rows until the last one is written."""
    monkeypatch.setattr(move_to_status, "WINDOW", 2)
    ids = [tasks.nothing.enqueue().id for _ in range(5)]
    told = []

    def tell(count, last):
        told.append((count, str(last)))
        if count == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Task.objects.cancel(progress=tell)
    assert told == [(2, ids[3]), (4, ids[1])], "the newest first"
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == ["READY", *["CANCELLED"] * 4]
    told.clear()
    with pytest.raises(KeyboardInterrupt):
        Task.objects.retry(progress=tell)
    assert told == [(2, ids[2]), (4, ids[4])], "the oldest first"
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


def test_in_a_transaction_of_the_caller_all_are_moved_at_once_or_none(monkeypatch):
    monkeypatch.setattr(move_to_status, "WINDOW", 2)
    for _ in range(5):
        tasks.nothing.enqueue()
    told = []
    with pytest.raises(KeyError), transaction.atomic():
        assert Task.objects.cancel(progress=lambda count, last: told.append(count)) == 5
        raise KeyError
    assert told == []
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


def test_some_at_a_time_count_what_waits_for_one_of_them_too(monkeypatch):
    """The end of the one cancels the other: it was asked for, so it is among those that were moved."""
    monkeypatch.setattr(move_to_status, "WINDOW", 1)
    tasks.nothing.using(after=[tasks.nothing.enqueue()]).enqueue()
    assert Task.objects.cancel() == 2


def test_only_tasks_of_a_status_from_which_they_may_move_are_moved(claim):
    running, ready = (int(tasks.nothing.enqueue().id) for _ in range(2))
    claim()
    assert movable(TaskStatus.READY, FINISHED) == ["CANCELLED", "FAILED"]
    assert move(Task.objects.all(), TaskStatus.CANCELLED, {"queue": "x"}, among=FINISHED) == []
    moved = move(Task.objects.all(), TaskStatus.CANCELLED, {"queue": "x"}, among=[TaskStatus.READY])
    assert moved == [(ready, "x", "READY", None)]
    assert Task.objects.get(pk=running).queue == "default"


def test_a_task_whose_row_somebody_has_locked_is_passed_over(locked):
    held, free = (int(tasks.nothing.enqueue().id) for _ in range(2))
    with locked(held):
        moved = move(Task.objects.all(), TaskStatus.CANCELLED, {"priority": 3}, among=[TaskStatus.READY])
    assert [id_ for id_, *_ in moved] == [free]


def test_ids_are_compared_as_one_array():
    ids = [int(tasks.nothing.enqueue().id) for _ in range(3)]
    assert set(Task.objects.filter(is_among(ids[1:])).values_list("pk", flat=True)) == {*ids[1:]}
    assert not Task.objects.filter(is_among([])).exists()
