"""The log records of attempts that have succeeded."""

from __future__ import annotations

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.store.logs import write_logs
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_each_log_is_written_into_the_row_of_its_claim_unless_this_was_lost(claim):
    enqueue_many(tasks.nothing, [{}] * 3)
    first, second, lost = claim(3)
    first.log, second.log, lost.log = "a", "", "c"
    Task.objects.filter(pk=second.id).update(log="of the attempt before")
    Task.objects.filter(pk=lost.id).update(attempts=2, log="of the attempt after")
    write_logs("default", [first, second, lost])
    assert list(Task.objects.order_by("id").values_list("log", flat=True)) == ["a", None, "of the attempt after"]


def test_the_log_of_one_claim_is_written_and_a_locked_row_is_skipped(claim, locked):
    """Another outcome of the same task may be written at this moment."""
    tasks.nothing.enqueue()
    [mine] = claim()
    mine.log = "a"
    with locked(mine.id):
        write_logs("default", [mine])
    assert Task.objects.get().log is None
    write_logs("default", [mine])
    assert Task.objects.get().log == "a"
