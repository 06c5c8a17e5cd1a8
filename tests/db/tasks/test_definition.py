"""What a task offers: enqueueing when the data is there, and metadata."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock.errors import TaskArgumentsError
from django_pglock.models import Task
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_on_commit_means_after_the_commit_and_never_after_a_rollback():
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(1)
        assert not Task.objects.exists()
    assert Task.objects.get().args == [1]
    with transaction.atomic():
        tasks.echo.enqueue_on_commit(2)
        transaction.set_rollback(True)
    tasks.echo.enqueue_on_commit(3)
    assert [row.args for row in Task.objects.order_by("id")] == [[1], [3]]


def test_arguments_are_checked_while_they_can_be_mended():
    with transaction.atomic(), pytest.raises(TaskArgumentsError):
        tasks.echo.enqueue_on_commit(object())


def test_meta_travels_with_the_task():
    tasks.echo.using(meta={"trace": "abc"}).enqueue(1)
    assert Task.objects.get().meta == {"trace": "abc"}
