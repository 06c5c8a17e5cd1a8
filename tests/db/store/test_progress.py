"""The progress of running tasks is written in few statements."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.store.outcome import Succeeded
from django_pglock.store.requests_to_worker import write_logs, write_progress
from django_pglock.store.settle import settle
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("is_last", [False, True])
def test_progress_is_written_into_the_row_of_its_own_task_only(claim, is_last):
    enqueue_many(tasks.nothing, [{}] * 2)
    mine, other = claim(2)
    mine.progress = '{"done": 1}'
    write_progress("default", [mine], is_last=is_last)
    assert Task.objects.get(pk=mine.id).progress == {"done": 1}
    assert Task.objects.get(pk=other.id).progress is None


def test_progress_of_a_lost_claim_changes_nothing(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    mine.progress = '{"done": 1}'
    Task.objects.update(attempts=2)
    for is_last in (False, True):
        write_progress("default", [mine], is_last=is_last)
    assert Task.objects.get().progress is None
    assert mine.written_progress is None


def test_progress_of_a_finished_task_changes_nothing(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, Succeeded())], mine.worker)
    mine.progress = '{"done": 1}'
    write_progress("default", [mine])
    assert Task.objects.get().progress is None


def test_a_locked_row_does_not_hold_up_the_heartbeat(claim, in_threads):
    from django.db import transaction

    tasks.nothing.enqueue()
    [mine] = claim()
    mine.progress = '{"done": 1}'
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=mine.id)
        in_threads(lambda _: write_progress("default", [mine]), 1)
    assert mine.written_progress is None, "so it is tried again"
    write_progress("default", [mine])
    assert Task.objects.get().progress == {"done": 1}
    assert mine.written_progress is mine.progress


def hot_updates():
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute("SELECT pg_stat_get_tuples_hot_updated('django_pglock_task'::regclass)")
        return cursor.fetchone()[0]


def test_progress_is_written_beside_the_old_version_of_the_row(claim):
    """The update is HOT: it writes no index entry, and later reads of the page prune the old version."""
    tasks.nothing.enqueue()
    [mine] = claim()
    for number in range(3):
        mine.progress = f'{{"done": {number}}}'
        write_progress("default", [mine], is_last=number == 2)
    before = hot_updates()
    mine.progress = '{"done": 9}'
    with CaptureQueriesContext(connection) as queries:
        write_progress("default", [mine])
    assert len(queries) == 1
    assert hot_updates() == before + 1


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
