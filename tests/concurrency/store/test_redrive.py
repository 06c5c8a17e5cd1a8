"""Concurrent redrives: a group gets one, and tasks of two groups or of two redrives are retried once each."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_pglock.models import Task
from django_pglock.store.bulk import Work, change_batch, enqueue_redrive
from tests.db.admin.visits import make
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db(transaction=True)


def test_concurrent_redrives_of_a_group_become_one_redrive(in_threads):
    made = in_threads(lambda _: enqueue_redrive("default", 7, 1), 4)
    assert len({id_ for id_, _ in made}) == 1
    assert sorted(is_new for _, is_new in made) == [False, False, False, True]


def test_two_redrives_of_one_group_retry_each_task_once(in_threads):
    """As when one person retries the group at once while another person redrives it."""
    rows = [fail(fingerprint=7, queue="elsewhere") for _ in range(40)]
    workers = [make("RUNNING", attempts=1) for _ in range(2)]
    before = timezone.now()

    def run(number):
        done, is_over, work = 0, False, Work("retry", fingerprint=7)
        while not is_over:
            done, is_over, _ = change_batch("default", work, before=before, limit=5, by=workers[number].pk, attempt=1)
        return done

    done = in_threads(run, 2)
    left = Task.objects.filter(pk__in=[row.pk for row in rows], status="FAILED").count()
    assert sum(done) + left == 40, "no task is counted by both"
    assert Task.objects.filter(queue="elsewhere", status="READY").count() == 40 - left
