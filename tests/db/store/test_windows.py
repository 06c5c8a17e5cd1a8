"""Verbs change many tasks in windows, and in a transaction of the caller all at once."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock.models import Task
from django_pglock.store import operate
from django_pglock.store.statements import is_among
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def windows(monkeypatch):
    """The ids of each window of two tasks that a verb changes. There is an interrupt before a third window."""
    seen, change = [], operate._change_window

    def change_and_note(tasks, ids, *values):
        if len(seen) == 2:
            seen.clear()
            raise KeyboardInterrupt
        seen.append(ids)
        return change(tasks, ids, *values)

    monkeypatch.setattr(operate, "WINDOW", 2)
    monkeypatch.setattr(operate, "_change_window", change_and_note)
    return seen


def test_an_interrupt_keeps_the_changes_of_finished_windows(windows):
    """With one transaction for all tasks, workers would wait for the locked rows until its end."""
    for _ in range(5):
        tasks.nothing.enqueue()
    with pytest.raises(KeyboardInterrupt):
        Task.objects.cancel()
    statuses = Task.objects.order_by("id").values_list("status", flat=True)
    assert list(statuses) == ["READY", *["CANCELLED"] * 4], "the newest first"
    Task.objects.all().cancel()
    windows.clear()
    with pytest.raises(KeyboardInterrupt):
        Task.objects.retry()
    assert list(statuses.all()) == [*["READY"] * 4, "CANCELLED"], "the oldest first"


def test_a_transaction_of_the_caller_changes_all_tasks_or_none(windows):
    ids = [int(tasks.nothing.enqueue().id) for _ in range(3)]
    with pytest.raises(KeyError), transaction.atomic():
        assert Task.objects.cancel() == 3
        raise KeyError
    assert windows == [[ids[2], ids[1]], [ids[0]]]
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


def test_a_window_counts_dependents_that_an_earlier_window_cancelled(monkeypatch):
    """The end of one task cancels the other. That one was requested, too, so it is counted."""
    monkeypatch.setattr(operate, "WINDOW", 1)
    tasks.nothing.using(after=[tasks.nothing.enqueue()]).enqueue()
    assert Task.objects.cancel() == 2


def test_is_among_filters_by_an_array_of_ids():
    ids = [int(tasks.nothing.enqueue().id) for _ in range(3)]
    assert set(Task.objects.filter(is_among(ids[1:])).values_list("pk", flat=True)) == {*ids[1:]}
    assert not Task.objects.filter(is_among([])).exists()
