"""Verbs change many tasks in windows, and in a transaction of the caller all at once."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock.models import Task
from django_pglock.store import operate
from django_pglock.store.statements import is_among
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_an_interrupt_keeps_the_changes_of_finished_windows(monkeypatch):
    """With one transaction for all tasks, workers would wait for the locked rows until its end."""
    monkeypatch.setattr(operate, "WINDOW", 2)
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


def test_progress_names_the_last_task_of_each_window(monkeypatch):
    monkeypatch.setattr(operate, "WINDOW", 3)
    ids = [int(tasks.nothing.enqueue().id) for _ in range(4)]
    told = []
    assert Task.objects.cancel(progress=lambda *values: told.append(values)) == 4
    assert told == [(3, ids[1]), (4, ids[0])]


def test_a_transaction_of_the_caller_changes_all_tasks_or_none(monkeypatch):
    monkeypatch.setattr(operate, "WINDOW", 2)
    for _ in range(5):
        tasks.nothing.enqueue()
    told = []
    with pytest.raises(KeyError), transaction.atomic():
        assert Task.objects.cancel(progress=lambda count, last: told.append(count)) == 5
        raise KeyError
    assert told == [2, 4, 5]
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
